// AdamW (Loshchilov and Hutter 2019) over many parameters, in torch's order of operations, and sums of squares.
#include <vector>

#include "threads.h"

namespace {

constexpr Index BLOCK = 1 << 15;  // values that a thread processes at a time

}  // namespace

// One update of a parameter; mirrored in library.py.
struct AdamW {
    float *param, *exp_avg, *exp_avg_sq;
    const void* grad;
    bf16* copy;  // a bf16 copy of the parameter to update as well, or null
    Index n;
    DType grad_dtype;
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2;  // 1 - beta^step
    float grad_scale;                // the gradient is divided by it
};

namespace {

template <class T> void update_block(const AdamW& u, Index begin, Index end) {
    const float decay = 1.0f - u.lr * u.weight_decay, step_size = u.lr / u.correction1;
    const float inverse_scale = 1.0f / u.grad_scale, root2 = std::sqrt(u.correction2);
    float *param = u.param, *exp_avg = u.exp_avg, *exp_avg_sq = u.exp_avg_sq;
    const T* g = (const T*)u.grad;
#pragma GCC ivdep
    for (Index i = begin; i < end; i++) {
        const float gradient = to_float(g[i]) * inverse_scale;
        const float m = exp_avg[i] + (gradient - exp_avg[i]) * (1.0f - u.beta1);
        const float v = exp_avg_sq[i] * u.beta2 + gradient * gradient * (1.0f - u.beta2);
        const float p = param[i] * decay - step_size * m / (std::sqrt(v) / root2 + u.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p;
    }
    if (u.copy)  // now, while the block is in the cache
        for (Index i = begin; i < end; i++) u.copy[i] = round_to<bf16>(param[i]);
}

template <class T> double sum_of_squares(const T* x, Index n) {
    double total = 0;
    for (Index begin = 0; begin < n; begin += 1024) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (Index i = begin; i < std::min(n, begin + 1024); i++) sum += to_float(x[i]) * to_float(x[i]);
        total += sum;
    }
    return total;
}

}  // namespace

EXPORT void megatoken_adamw(const AdamW* updates, Index n) {
    std::vector<std::pair<Index, Index>> blocks;  // (update, first value)
    for (Index i = 0; i < n; i++)
        for (Index begin = 0; begin < updates[i].n; begin += BLOCK) blocks.emplace_back(i, begin);
    parallel_for(blocks.size(), [&](Index block) {
        const auto [i, begin] = blocks[block];
        const AdamW& u = updates[i];
        with_type(u.grad_dtype, [&, begin = begin](auto t) { update_block<decltype(t)>(u, begin, std::min(u.n, begin + BLOCK)); });
    });
}

// Values of a tensor; mirrored in library.py.
struct Values {
    const void* data;
    Index n;
    DType dtype;
};

// The sum of squares of all tensors in fp64, added in an order that does not depend on the number of threads.
EXPORT double megatoken_sum_of_squares(const Values* tensors, Index n) {
    std::vector<std::pair<Index, Index>> blocks;  // (tensor, first value)
    for (Index i = 0; i < n; i++)
        for (Index begin = 0; begin < tensors[i].n; begin += BLOCK) blocks.emplace_back(i, begin);
    std::vector<double> partial(blocks.size());
    parallel_for(blocks.size(), [&](Index block) {
        const auto [i, begin] = blocks[block];
        with_type(tensors[i].dtype, [&, i = i, begin = begin](auto t) {
            partial[block] = sum_of_squares((const decltype(t)*)tensors[i].data + begin, std::min(BLOCK, tensors[i].n - begin));
        });
    });
    double total = 0, of_tensor = 0;
    for (size_t block = 0; block < blocks.size(); block++) {
        of_tensor += partial[block];
        if (block + 1 < blocks.size() && blocks[block + 1].second > 0) continue;
        total += of_tensor;
        of_tensor = 0;
    }
    return total;
}
