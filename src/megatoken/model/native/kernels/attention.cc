// Attention, softmax(q k^T / sqrt(D)) v, forward and backward, in blocks whose scores stay in the caches (Dao et al. 2022).
//
// Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head width. Query head h uses key/value head
// h / (H / K). The forward saves for the backward each query's log-sum-exp over all its keys, to base 2.
//
// In each matmul with scores, the long operand (queries, keys or values) is A, in panels that are packed once, and the
// block's scores are the columns of B, so that they are packed in the order in which they were computed. Results are
// therefore transposed, (D, rows), until they are stored.
#include <limits>
#include <numeric>

#include "kernels.h"
#include "scores.h"
#include "scratch.h"
#include "threads.h"

namespace {

thread_local Scratch scratch;

constexpr Index round_up(Index n, Index step) { return (n + step - 1) / step * step; }

constexpr float LOG2_E = 1.44269504f;

// 2^y for y up to slightly above 0, with a relative error below 2e-7; results below 2^-127 are 0. A NaN stays NaN.
inline float exp2_below(float y) {
    constexpr float TO_INTEGER = 12582912.0f + 127;  // adding 1.5 * 2^23 rounds to an integer; 127 is the exponent of 1
    y = y < -127.0f ? -127.0f : y;
    const float shifted = y + TO_INTEGER, f = y - (shifted - TO_INTEGER);
    float p = 1.54035304e-4f;  // Taylor series of 2^f, |f| <= 1/2
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return p * __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, shifted) << 23);
}

template <class T> float dot(const T* x, const T* y, Index n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Index i = 0; i < n; i++) sum += to_float(x[i]) * to_float(y[i]);
    return sum;
}

template <class T> void add_scaled(const T* x, float factor, Index n, float* __restrict sum) {
    for (Index i = 0; i < n; i++) sum[i] += factor * to_float(x[i]);
}

template <class T> struct Attention {
    using P = Panel<T>;
    using Element = typename P::Element;
    static constexpr Index MR = P::MR, NR = P::NR, STEP = P::K_STEP;
    static_assert(NR % STEP == 0);
    // A block is NR queries and KEYS keys in the forward, QUERIES queries and NR keys in the backward.
    static constexpr Index KEYS = round_up(128, std::lcm(MR, STEP)), QUERIES = round_up(128, NR);
    static constexpr Index QUERY_ROWS = round_up(QUERIES, MR);

    Index H, K, Tq, S, D;
    bool causal;
    float scale = LOG2_E / std::sqrt(float(D));  // of scores, which are exponents of 2
    Index D_rows = round_up(D, MR);

    // Packs all rows of `a` into panels of MR rows and k values.
    static void pack_rows(const T* a, Index row_stride, Index k_stride, Index rows, Index k, Element* panels) {
        for (Index r = 0; r < rows; r += MR)
            pack_a(a + r * row_stride, row_stride, k_stride, std::min(MR, rows - r), k, panels + r / MR * P::a_size(k));
    }

    // c (D_rows x NR) += A B over k values. A's panels have k_all values each, of which those from `begin` on are used.
    void add_product(const Element* a, Index k_all, Index begin, const Element* b, Index k, float* c) const {
        for (Index d = 0; d < D; d += MR) block_product<T>(a + d / MR * P::a_size(k_all) + P::a_size(begin), b, k, c + d * NR, NR, true, D - d);
    }

    // Computes blocks first, first + step, ... of NR queries, for all query heads that share key head `kh`.
    void forward(const View& q, const View& k, const View& v, const View& y, float* lse, Index b, Index kh, Index first,
                 Index step) const {
        scratch.rewind();
        Element* key_panels = scratch.take<Element>(round_up(S, MR) / MR * P::a_size(D));  // rows of keys
        Element* value_panels = scratch.take<Element>(D_rows / MR * P::a_size(S));  // rows of v^T
        Element* query_panel = scratch.take<Element>(P::b_size(D));
        Element* panel = scratch.take<Element>(P::b_size(KEYS));
        float* scores = scratch.take<float>(KEYS * NR);  // (keys, queries)
        float* out = scratch.take<float>(D_rows * NR);  // (D, queries)
        const T *kp = k.head<T>(b, kh), *vp = v.head<T>(b, kh);
        pack_rows(kp, k.row_stride, 1, S, D, key_panels);
        pack_rows(vp, 1, v.row_stride, D, S, value_panels);
        for (Index h = kh * (H / K); h < (kh + 1) * (H / K); h++) {
            const T* qp = q.head<T>(b, h);
            for (Index q0 = first * NR; q0 < Tq; q0 += step * NR) {
                const Index n = std::min(NR, Tq - q0), visible = causal ? q0 + n : S;
                pack_b(qp + q0 * q.row_stride, 1, q.row_stride, n, D, query_panel);
                float top[NR], sum[NR], factor[NR];
                std::fill_n(top, NR, -std::numeric_limits<float>::infinity());
                std::fill_n(sum, NR, 0.0f);
                std::fill_n(out, D_rows * NR, 0.0f);
                for (Index k0 = 0; k0 < visible; k0 += KEYS) {
                    const Index keys = std::min(KEYS, visible - k0);
                    for (Index r = 0; r < keys; r += MR)
                        block_product<T>(key_panels + (k0 + r) / MR * P::a_size(D), query_panel, D, scores + r * NR, NR, false, keys - r);
                    if (causal)
                        for (Index r = std::max(Index(0), q0 - k0); r < keys; r++)
                            for (Index j = 0; j < NR; j++)
                                if (k0 + r > q0 + j) scores[r * NR + j] = -std::numeric_limits<float>::infinity();
                    online_softmax(scores, keys, top, sum, factor);
                    for (Index d = 0; d < D_rows; d++)
                        for (Index j = 0; j < NR; j++) out[d * NR + j] *= factor[j];
                    add_product(value_panels, S, k0, pack_scores<T>(scores, keys, panel), keys, out);
                }
                for (Index j = 0; j < n; j++) {
                    lse[(b * H + h) * Tq + q0 + j] = scale * top[j] + std::log2(sum[j]);
                    factor[j] = 1 / sum[j];
                }
                store_transposed<T>(out, D, n, factor, y.head<T>(b, h) + q0 * y.row_stride, y.row_stride);
            }
        }
    }

    // Computes a single query that sees all keys. Each key is read only once, so nothing is packed.
    void decode(const View& q, const View& k, const View& v, const View& y, float* lse, Index b, Index kh) const {
        scratch.rewind();
        float *scores = scratch.take<float>(S), *out = scratch.take<float>(D);
        const T *kp = k.head<T>(b, kh), *vp = v.head<T>(b, kh);
        for (Index h = kh * (H / K); h < (kh + 1) * (H / K); h++) {
            float top = -std::numeric_limits<float>::infinity(), sum = 0;
            for (Index s = 0; s < S; s++) {
                scores[s] = scale * dot(q.head<T>(b, h), kp + s * k.row_stride, D);
                top = std::max(top, scores[s]);
            }
            for (Index s = 0; s < S; s++) scores[s] = exp2_below(scores[s] - top);
            std::fill_n(out, D, 0.0f);
            for (Index s = 0; s < S; s++) {
                sum += scores[s];
                add_scaled(vp + s * v.row_stride, scores[s], D, out);
            }
            lse[b * H + h] = top + std::log2(sum);
            for (Index d = 0; d < D; d++) y.head<T>(b, h)[d] = round_to<T>(out[d] / sum);
        }
    }

    // Causal attention, for all query heads that share key head `kh`. If dq_too, computes dq for blocks first, first + step,
    // ... of QUERIES queries; if dkv_too, dk and dv for blocks first, first + step, ... of NR keys.
    void backward(const View& q, const View& k, const View& v, const View& y, const View& dy, const float* lse, const View& dq,
                  const View& dk, const View& dv, Index b, Index kh, Index first, Index step, bool dq_too, bool dkv_too) const {
        scratch.rewind();
        const Index key_blocks = round_up(S, NR) / NR;
        Element* key_columns = scratch.take<Element>(key_blocks * P::b_size(D));  // columns of k^T
        Element* value_columns = scratch.take<Element>(key_blocks * P::b_size(D));
        Element* key_panels = scratch.take<Element>(D_rows / MR * P::a_size(S));  // rows of k^T
        Element* query_panels = scratch.take<Element>(QUERY_ROWS / MR * P::a_size(D));  // rows of q
        Element* dy_panels = scratch.take<Element>(QUERY_ROWS / MR * P::a_size(D));
        Element* query_t_panels = scratch.take<Element>(D_rows / MR * P::a_size(QUERIES));  // rows of q^T
        Element* dy_t_panels = scratch.take<Element>(D_rows / MR * P::a_size(QUERIES));
        Element* panel = scratch.take<Element>(P::b_size(QUERIES));
        Element* dscore_t_panels = scratch.take<Element>(QUERIES / NR * P::b_size(key_blocks * NR));  // columns of queries
        float* weights = scratch.take<float>(QUERY_ROWS * NR);  // (queries, keys)
        float* dscores = scratch.take<float>(QUERY_ROWS * NR);
        float* dq_t = scratch.take<float>(D_rows * NR);  // (D, queries)
        float* dk_t = scratch.take<float>(key_blocks * D_rows * NR);  // blocks of (D, keys)
        float* dv_t = scratch.take<float>(key_blocks * D_rows * NR);
        float factor[NR];
        const T *kp = k.head<T>(b, kh), *vp = v.head<T>(b, kh);
        for (Index j = 0; j < S; j += NR) {
            pack_b(kp + j * k.row_stride, 1, k.row_stride, std::min(NR, S - j), D, key_columns + j / NR * P::b_size(D));
            pack_b(vp + j * v.row_stride, 1, v.row_stride, std::min(NR, S - j), D, value_columns + j / NR * P::b_size(D));
        }
        pack_rows(kp, 1, k.row_stride, D, S, key_panels);
        std::fill_n(dk_t, key_blocks * D_rows * NR, 0.0f);
        std::fill_n(dv_t, key_blocks * D_rows * NR, 0.0f);
        for (Index h = kh * (H / K); h < (kh + 1) * (H / K); h++)
            for (Index q0 = dkv_too ? 0 : first * QUERIES; q0 < Tq; q0 += dkv_too ? QUERIES : step * QUERIES) {
                const Index n = std::min(QUERIES, Tq - q0);
                const T *qp = q.head<T>(b, h) + q0 * q.row_stride, *dyp = dy.head<T>(b, h) + q0 * dy.row_stride;
                const T* yp = y.head<T>(b, h) + q0 * y.row_stride;
                pack_rows(qp, q.row_stride, 1, n, D, query_panels);
                pack_rows(dyp, dy.row_stride, 1, n, D, dy_panels);
                pack_rows(qp, 1, q.row_stride, D, n, query_t_panels);
                pack_rows(dyp, 1, dy.row_stride, D, n, dy_t_panels);
                float delta[QUERIES];  // sum of weight * d weight over a query's keys, which equals dy . y
                for (Index i = 0; i < n; i++) delta[i] = dot(yp + i * y.row_stride, dyp + i * dy.row_stride, D);
                for (Index block = dq_too ? 0 : first; block * NR < q0 + n; block += dq_too ? 1 : step) {
                    const Index k0 = block * NR, begin = std::max(Index(0), k0 - q0);  // the first query that sees a key of the block
                    for (Index i = begin / MR * MR; i < n; i += MR) {
                        block_product<T>(query_panels + i / MR * P::a_size(D), key_columns + block * P::b_size(D), D, weights + i * NR, NR, false, n - i);
                        block_product<T>(dy_panels + i / MR * P::a_size(D), value_columns + block * P::b_size(D), D, dscores + i * NR, NR, false, n - i);
                    }
                    backward_softmax(weights, dscores, begin, n, lse + (b * H + h) * Tq + q0, delta, q0 - k0);
                    if (dkv_too) {
                        const Element* columns = pack_scores<T>(weights + begin * NR, n - begin, panel);
                        add_product(dy_t_panels, n, begin, columns, n - begin, dv_t + block * D_rows * NR);
                        columns = pack_scores<T>(dscores + begin * NR, n - begin, panel);
                        add_product(query_t_panels, n, begin, columns, n - begin, dk_t + block * D_rows * NR);
                    }
                    if (dq_too)
                        for (Index i = begin; i < n; i += NR)
                            pack_scores_transposed<T>(dscores + i * NR, std::min(NR, n - i),
                                                      dscore_t_panels + i / NR * P::b_size(key_blocks * NR) + P::b_size(k0));
                }
                if (dq_too)
                    for (Index i = 0; i < n; i += NR) {
                        const Index rows = std::min(NR, n - i);
                        std::fill_n(dq_t, D_rows * NR, 0.0f);
                        std::fill_n(factor, NR, 1 / std::sqrt(float(D)));
                        add_product(key_panels, S, 0, dscore_t_panels + i / NR * P::b_size(key_blocks * NR), q0 + i + rows, dq_t);
                        store_transposed<T>(dq_t, D, rows, factor, dq.head<T>(b, h) + (q0 + i) * dq.row_stride, dq.row_stride);
                    }
            }
        if (dkv_too)
            for (Index block = first; block < key_blocks; block += step) {
                const Index n = std::min(NR, S - block * NR);
                std::fill_n(factor, NR, 1 / std::sqrt(float(D)));
                store_transposed<T>(dk_t + block * D_rows * NR, D, n, factor, dk.head<T>(b, kh) + block * NR * dk.row_stride, dk.row_stride);
                std::fill_n(factor, NR, 1.0f);
                store_transposed<T>(dv_t + block * D_rows * NR, D, n, factor, dv.head<T>(b, kh) + block * NR * dv.row_stride, dv.row_stride);
            }
    }

    // Updates `top`, each query's greatest score so far, turns scores (keys, NR) into weights 2^(scale * (score - top)), and
    // adds them to `sum`. `factor` is what earlier sums must be multiplied by because `top` has changed.
    __attribute__((noinline)) void online_softmax(float* __restrict scores, Index keys, float* __restrict top, float* __restrict sum, float* __restrict factor) const {
        constexpr Index LANES = 16;  // queries at a time, so that their maxima and sums stay in registers
        for (Index j0 = 0; j0 < NR; j0 += LANES) {
            float greatest[LANES], total[LANES], offset[LANES];
            for (Index j = 0; j < LANES; j++) greatest[j] = top[j0 + j];
            for (Index r = 0; r < keys; r++)
#pragma omp simd
                for (Index j = 0; j < LANES; j++) greatest[j] = std::max(greatest[j], scores[r * NR + j0 + j]);
            for (Index j = 0; j < LANES; j++) {
                factor[j0 + j] = exp2_below(scale * (top[j0 + j] - greatest[j]));
                total[j] = sum[j0 + j] * factor[j0 + j];
                offset[j] = -scale * greatest[j];
                top[j0 + j] = greatest[j];
            }
            for (Index r = 0; r < keys; r++)
#pragma omp simd
                for (Index j = 0; j < LANES; j++) {
                    const float weight = exp2_below(scale * scores[r * NR + j0 + j] + offset[j]);
                    scores[r * NR + j0 + j] = weight;
                    total[j] += weight;
                }
            for (Index j = 0; j < LANES; j++) sum[j0 + j] = total[j];
        }
    }

    // Turns the scores and d weights in rows begin to n (row stride NR) into weights and d scores * sqrt(D). Row i sees the
    // columns up to i + offset.
    __attribute__((noinline)) void backward_softmax(float* __restrict scores, float* __restrict dweights, Index begin, Index n, const float* lse, const float* delta,
                          Index offset) const {
        for (Index i = begin; i < n; i++) {
            float *s = scores + i * NR, *d = dweights + i * NR;
            for (Index j = std::max(Index(0), i + offset + 1); j < NR; j++) s[j] = -std::numeric_limits<float>::infinity(), d[j] = 0;
            const float top = lse[i], sum = delta[i];
#pragma omp simd
            for (Index j = 0; j < NR; j++) {
                const float weight = exp2_below(scale * s[j] - top);
                s[j] = weight;
                d[j] = weight * (d[j] - sum);
            }
        }
    }
};

// Calls body(b, kv head, part, parts) for each (b, kv head). If that gives fewer than `tasks_per_thread` tasks per thread,
// each is split into several parts, which must not change any result.
template <class Body> void for_heads(Index B, Index K, Index tasks_per_thread, Body body) {
    const Index parts = std::max(Index(1), (tasks_per_thread * pool().threads() + B * K - 1) / (B * K));
    parallel_for(B * K * parts, [&](Index task) {
        prepare_products();
        body(task / parts / K, task / parts % K, task % parts, parts);
    });
}

}  // namespace

// q (B, H, T, D), k and v (B, K, S, D) -> y like q, lse (B, H, T). If causal, T equals S and a query sees no later key;
// otherwise, every query sees every key.
EXPORT void megatoken_attention_forward(DType dtype, const View* q, const View* k, const View* v, const View* y, float* lse, Index B,
                                        Index H, Index K, Index T, Index S, Index D, int32_t causal) {
    with_type(dtype, [&](auto t) {
        const Attention<decltype(t)> attention{H, K, T, S, D, bool(causal)};
        if (T == 1) return for_heads(B, K, 0, [&](Index b, Index kh, Index, Index) { attention.decode(*q, *k, *v, *y, lse, b, kh); });
        for_heads(B, K, 4, [&](Index b, Index kh, Index part, Index parts) {
            attention.forward(*q, *k, *v, *y, lse, b, kh, part, parts);
        });
    });
}

// The gradients of causal attention. With fewer (b, kv head) than threads, dq is computed separately from dk and dv.
EXPORT void megatoken_attention_backward(DType dtype, const View* q, const View* k, const View* v, const View* y, const View* dy,
                                         const float* lse, const View* dq, const View* dk, const View* dv, Index B, Index H, Index K,
                                         Index T, Index D) {
    with_type(dtype, [&](auto t) {
        const Attention<decltype(t)> attention{H, K, T, T, D, true};
        for_heads(B, K, 1, [&](Index b, Index kh, Index part, Index parts) {
            if (parts == 1) attention.backward(*q, *k, *v, *y, *dy, lse, *dq, *dk, *dv, b, kh, 0, 1, true, true);
            else
                for (bool dq_too : {true, false})
                    attention.backward(*q, *k, *v, *y, *dy, lse, *dq, *dk, *dv, b, kh, part, parts, dq_too, !dq_too);
        });
    });
}
