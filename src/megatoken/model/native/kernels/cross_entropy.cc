// Cross-entropy of rows of logits, which are overwritten by their gradient: softmax, minus 1 at the target.
//
// Computes the same as `softmax_cross_entropy` in model/kernels/cross_entropy.py. A row is read twice, from the cache, and
// written once; its exponentials are kept in fp32 in between.
#include "scratch.h"
#include "threads.h"

namespace {

constexpr Index ROWS = 8;  // that a thread processes at a time

thread_local Scratch scratch;

// softcap * tanh(x / softcap), or x if there is no softcap.
template <bool CAPPED> inline float cap(float x, float softcap) { return CAPPED ? softcap * tanh_approx(x / softcap) : x; }

template <bool CAPPED, class T>
void cross_entropy(T* logits, const int64_t* targets, float* loss, Index N, Index V, Index vocab_size, float softcap, bool overwrite) {
    parallel_for((N + ROWS - 1) / ROWS, [=](Index block) {
        scratch.rewind();
        float* e = scratch.take<float>(vocab_size);
        for (Index n = block * ROWS; n < std::min(N, (block + 1) * ROWS); n++) {
            T* x = logits + n * V;
            const Index target = targets[n];
            float top = -INFINITY, total = 0, unordered = 0;
#pragma omp simd reduction(max : top) reduction(+ : unordered)
            for (Index v = 0; v < vocab_size; v++) {
                const float score = cap<CAPPED>(to_float(x[v]), softcap);
                top = std::max(top, score);
                unordered += score != score ? 1.0f : 0.0f;
            }
            if (unordered > 0) top = NAN;  // std::max ignores a NaN
#pragma omp simd reduction(+ : total)
            for (Index v = 0; v < vocab_size; v++) {
                e[v] = exp_approx(cap<CAPPED>(to_float(x[v]), softcap) - top);
                total += e[v];
            }
            if (top != top) total = NAN;
            loss[n] = target < 0 ? 0.0f : std::log(total) + top - cap<CAPPED>(to_float(x[target]), softcap);
            if (!overwrite) continue;
            const float scale = target < 0 ? 0.0f : 1.0f / total;
            for (Index v = 0; v < vocab_size; v++) e[v] *= scale;
            if (target >= 0) e[target] -= 1.0f;
            if (CAPPED)
                for (Index v = 0; v < vocab_size; v++) {
                    const float share = cap<CAPPED>(to_float(x[v]), softcap) / softcap;
                    e[v] *= 1.0f - share * share;
                }
            for (Index v = 0; v < vocab_size; v++) x[v] = round_to<T>(e[v]);
            for (Index v = vocab_size; v < V; v++) x[v] = round_to<T>(0.0f);
        }
    });
}

}  // namespace

EXPORT void megatoken_cross_entropy(DType dtype, void* logits, const int64_t* targets, float* loss, Index N, Index V, Index vocab_size,
                                    float softcap, int32_t overwrite) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const auto compute = softcap > 0 ? cross_entropy<true, T> : cross_entropy<false, T>;
        compute((T*)logits, targets, loss, N, V, vocab_size, softcap, overwrite);
    });
}
