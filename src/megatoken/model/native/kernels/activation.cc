// Element-wise activations, forward and backward: GELU in its tanh form (Hendrycks and Gimpel 2016), SwiGLU's gate (Shazeer 2020).
#include "kernels.h"
#include "threads.h"

namespace {

// The factor by which GELU multiplies x: (1 + tanh(z / 2)) / 2 = 1 / (1 + e^-z) with z = sqrt(8 / pi) (x + 0.044715 x^3).
// e^-z is computed as in exp_approx; adding 1.5 * 2^23 to y leaves the integer n in the lowest bits.
inline float gelu_gate(float x) {
    constexpr float ROOT = 1.59576912f, CUBIC = 0.044715f, LOG2_E = 1.44269504f, ROUND = 12582912.0f;
    const uint32_t unclamped = __builtin_bit_cast(uint32_t, x * (-ROOT * LOG2_E - ROOT * LOG2_E * CUBIC * (x * x)));
    // Clamp |y| to 126 with integer operations, because compilers turn float comparisons into branches. This loses a NaN,
    // but the caller's factor x restores it.
    const uint32_t clamped = std::min(unclamped & 0x7fffffffu, __builtin_bit_cast(uint32_t, 126.0f)) | (unclamped & 0x80000000u);
    const float y = __builtin_bit_cast(float, clamped);
    const float n = y + ROUND, f = y - (n - ROUND);
    float p = 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return 1.0f / (1.0f + __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, p) + (__builtin_bit_cast(uint32_t, n) << 23)));
}

inline float gelu(float x) { return x * gelu_gate(x); }

inline float gelu_derivative(float x) {
    const float gate = gelu_gate(x);
    return gate + x * gate * (1.0f - gate) * (1.59576912f + 3.0f * 0.044715f * 1.59576912f * (x * x));
}

constexpr Index BLOCK = 4096;

// Calls body(begin, end) for blocks of [0, n) that fit in the L1 cache.
template <class Body> void for_blocks(Index n, Body body) {
    parallel_for((n + BLOCK - 1) / BLOCK, [&](Index block) { body(block * BLOCK, std::min(n, (block + 1) * BLOCK)); });
}

}  // namespace

EXPORT void megatoken_gelu_forward(DType dtype, const void* x, void* y, Index n) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const T* in = (const T*)x;
        T* out = (T*)y;
        for_blocks(n, [=](Index begin, Index end) {
            for (Index i = begin; i < end; i++) out[i] = round_to<T>(gelu(to_float(in[i])));
        });
    });
}

// dx may be the same memory as dy.
EXPORT void megatoken_gelu_backward(DType dtype, const void* dy, const void* x, void* dx, Index n) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const T *grad = (const T*)dy, *in = (const T*)x;
        T* out = (T*)dx;
        for_blocks(n, [=](Index begin, Index end) {
#pragma GCC ivdep
            for (Index i = begin; i < end; i++) out[i] = round_to<T>(to_float(grad[i]) * gelu_derivative(to_float(in[i])));
        });
    });
}

// y = silu(gate) * up
EXPORT void megatoken_swiglu_forward(DType dtype, const void* gate, const void* up, void* y, Index n) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const T *g = (const T*)gate, *u = (const T*)up;
        T* out = (T*)y;
        for_blocks(n, [=](Index begin, Index end) {
            for (Index i = begin; i < end; i++) {
                const float x = to_float(g[i]);
                out[i] = round_to<T>(x / (1.0f + exp_minus(x)) * to_float(u[i]));
            }
        });
    });
}

EXPORT void megatoken_swiglu_backward(DType dtype, const void* dy, const void* gate, const void* up, void* dgate, void* dup, Index n) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        const T *grad = (const T*)dy, *g = (const T*)gate, *u = (const T*)up;
        T *out_g = (T*)dgate, *out_u = (T*)dup;
        for_blocks(n, [=](Index begin, Index end) {
            for (Index i = begin; i < end; i++) {
                const float d = to_float(grad[i]), x = to_float(g[i]), e = exp_minus(x), s = 1.0f / (1.0f + e);
                out_g[i] = round_to<T>(d * to_float(u[i]) * s * (1.0f + x * s * e));
                out_u[i] = round_to<T>(d * x * s);
            }
        });
    });
}
