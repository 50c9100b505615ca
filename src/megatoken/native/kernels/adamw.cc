// AdamW (Loshchilov and Hutter 2019) over one parameter, in torch's order of operations, and sums of squares.
#include <vector>

#include "common.h"

namespace {

constexpr Index BLOCK = 1 << 15;  // values that a thread processes at a time

inline Index count_blocks(Index n) { return (n + BLOCK - 1) / BLOCK; }

}  // namespace

// Settings of one update of a parameter; mirrored in library.py.
struct AdamW {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2;  // 1 - beta^step
    float grad_scale;                // the gradient is divided by it
};

// copy: a bf16 copy of the parameter to update as well, or null.
EXPORT void megatoken_adamw(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, DType grad_dtype, bf16* copy, Index n,
                            const AdamW* update) {
    const AdamW u = *update;
    const float decay = 1.0f - u.lr * u.weight_decay, step_size = u.lr / u.correction1;
    const float inverse_scale = 1.0f / u.grad_scale, root2 = std::sqrt(u.correction2);
    with_type(grad_dtype, [&](auto t) {
        using T = decltype(t);
        const T* g = (const T*)grad;
#pragma omp parallel for schedule(static)
        for (Index block = 0; block < count_blocks(n); block++) {
            const Index end = std::min(n, (block + 1) * BLOCK);
#pragma GCC ivdep
            for (Index i = block * BLOCK; i < end; i++) {
                const float gradient = to_float(g[i]) * inverse_scale;
                const float m = exp_avg[i] + (gradient - exp_avg[i]) * (1.0f - u.beta1);
                const float v = exp_avg_sq[i] * u.beta2 + gradient * gradient * (1.0f - u.beta2);
                const float p = param[i] * decay - step_size * m / (std::sqrt(v) / root2 + u.eps);
                exp_avg[i] = m;
                exp_avg_sq[i] = v;
                param[i] = p;
            }
            if (copy)  // now, while the block is in the cache
                for (Index i = block * BLOCK; i < end; i++) copy[i] = round_to<bf16>(param[i]);
        }
    });
}

// The sum of squares in fp64, added in an order that does not depend on the number of threads.
EXPORT double megatoken_sum_of_squares(DType dtype, const void* values, Index n) {
    std::vector<double> partial(count_blocks(n));
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const T* x = (const T*)values;
#pragma omp parallel for schedule(static)
        for (Index block = 0; block < count_blocks(n); block++) {
            const Index end = std::min(n, (block + 1) * BLOCK);
            double total = 0;
            for (Index begin = block * BLOCK; begin < end; begin += 1024) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (Index i = begin; i < std::min(end, begin + 1024); i++) sum += to_float(x[i]) * to_float(x[i]);
                total += sum;
            }
            partial[block] = total;
        }
    });
    double total = 0;
    for (double sum : partial) total += sum;
    return total;
}
