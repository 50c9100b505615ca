// A transformer block in one call, forward and backward: the kernels of its parts, without Python between them.
//
// Shapes: B sequences of T tokens, N = B T rows; C channels, H query heads and K key/value heads of D channels, F hidden units.
#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace {

enum Parameter { NORM1, NORM1_BIAS, QKV, QKV_BIAS, OUT, OUT_BIAS, NORM2, NORM2_BIAS, GATE, GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS, PARAMETERS };

thread_local Scratch scratch, local;

}  // namespace

// Mirrored in library.py. Parameters that the model lacks are null; without a gate, the activation is GELU.
struct Block {
    DType dtype;
    int32_t rms;
    float eps;
    Index B, T, C, H, K, D, F;
    const void* parameters[PARAMETERS];
    const float *cos, *sin;  // (T, D) of the rotary embedding, or null
    const void* x;           // (N, C)
    void* y;                 // (N, C)
    void* saved;             // activations: (N, 4C + (H + 2K) D + 2F), with a gate 3F
    float* stats;            // (4 + H, N): means and scales of both norms, log-sum-exps
    const void* dy;          // of the backward: gradients
    void* dx;
    void* gradients[PARAMETERS];
};

namespace {

template <class T> struct BlockPass {
    const Block& p;
    const Index N = p.B * p.T, C = p.C, F = p.F, QKV_WIDTH = (p.H + 2 * p.K) * p.D;
    const bool has_gate = p.parameters[GATE] != nullptr;
    const T* x = (const T*)p.x;
    // What the forward saves.
    T *norm1 = (T*)p.saved, *qkv = norm1 + N * C, *heads = qkv + N * QKV_WIDTH, *middle = heads + N * C, *norm2 = middle + N * C;
    T *up = norm2 + N * C, *hidden = up + N * F, *gate = hidden + N * F;
    float *mean1 = p.stats, *scale1 = mean1 + N, *mean2 = scale1 + N, *scale2 = mean2 + N, *lse = scale2 + N;

    static Matrix rows(const void* data, Index width) { return {(void*)data, width, 1}; }
    static Matrix transposed(const void* data, Index width) { return {(void*)data, 1, width}; }

    // y (N, outputs) = x W^T + bias
    void linear(const T* in, Index inputs, Parameter weight, T* out, Index outputs) const {
        const Matmul m{p.dtype, p.dtype, N, outputs, inputs, rows(in, inputs), transposed(p.parameters[weight], inputs),
                       rows(out, outputs), p.parameters[weight + 1], nullptr, nullptr};
        megatoken_matmul(&m);
    }

    // The gradients of `linear`: of W and its bias, and dx = dy W, added to dx if `accumulate` is set.
    void linear_backward(const T* dy, Index outputs, Parameter weight, const T* in, Index inputs, T* dx, bool accumulate = false) const {
        float* sums = p.gradients[weight + 1] ? scratch.take<float>(outputs) : nullptr;
        const Matmul of_weight{p.dtype, p.dtype, outputs, inputs, N, transposed(dy, outputs), rows(in, inputs),
                               rows(p.gradients[weight], inputs), nullptr, nullptr, sums};
        megatoken_matmul(&of_weight);
        if (sums) round_all(sums, (T*)p.gradients[weight + 1], outputs);
        const Matmul of_input{p.dtype, p.dtype, N, inputs, outputs, rows(dy, outputs), rows(p.parameters[weight], inputs),
                              rows(dx, inputs), nullptr, accumulate ? dx : nullptr, nullptr};
        megatoken_matmul(&of_input);
    }

    static void round_all(const float* in, T* out, Index n) {
        for (Index i = 0; i < n; i++) out[i] = round_to<T>(in[i]);
    }

    // out = norm(in), or if `residual` is given, sum = in + residual and out = norm(sum)
    void norm(const T* in, const T* residual, T* sum, Parameter weight, T* out, float* mean, float* scale) const {
        megatoken_norm_forward(p.dtype, in, residual, sum, p.parameters[weight], p.parameters[weight + 1], out, mean, scale, N, C, p.eps,
                               p.rms);
    }

    // dx = dy + the gradient of `norm`
    void norm_backward(const T* dnorm, const T* in, Parameter weight, const float* mean, const float* scale, const T* dy, T* dx) const {
        float *dweight = scratch.take<float>(C), *dbias = p.gradients[weight + 1] ? scratch.take<float>(C) : nullptr;
        megatoken_norm_backward(p.dtype, dnorm, dy, in, mean, scale, p.parameters[weight], dx, dweight, dbias, N, C, p.rms);
        round_all(dweight, (T*)p.gradients[weight], C);
        if (dbias) round_all(dbias, (T*)p.gradients[weight + 1], C);
    }

    // Rotates the pairs (d, d + D / 2) of every head of q and k in place, by the negative angles if `inverse`.
    void rotate(T* packed, bool inverse) const {
        if (!p.cos) return;
        constexpr Index ROWS = 64;
        const Index D = p.D, P = D / 2, width = (p.H + p.K) * D, row_width = QKV_WIDTH;
        parallel_for((N + ROWS - 1) / ROWS, [=, *this](Index block) {
            local.rewind();
            float *in = local.take<float>(width), *turned = local.take<float>(width), *cos = local.take<float>(width), *sin = local.take<float>(width);
            for (Index n = block * ROWS; n < std::min(N, (block + 1) * ROWS); n++) {
                T* row = packed + n * row_width;
                for (Index i = 0; i < width; i++) in[i] = to_float(row[i]);
                for (Index head = 0; head < width; head += D) {
                    std::copy_n(in + head + P, P, turned + head);
                    std::copy_n(in + head, P, turned + head + P);
                    std::copy_n(p.cos + n % p.T * D, D, cos + head);
                    std::copy_n(p.sin + n % p.T * D, D, sin + head);
                }
                const float sign = inverse ? -1.0f : 1.0f;
#pragma GCC ivdep
                for (Index i = 0; i < width; i++) row[i] = round_to<T>(in[i] * cos[i] + sign * turned[i] * sin[i]);
            }
        });
    }

    View view(const T* packed, Index head, Index width) const { return {(void*)(packed + head * p.D), p.T * width, p.D, width}; }

    void forward() const {
        scratch.rewind();
        T* part = scratch.take<T>(N * C);
        norm(x, nullptr, nullptr, NORM1, norm1, mean1, scale1);
        linear(norm1, C, QKV, qkv, QKV_WIDTH);
        rotate(qkv, false);
        const View q = view(qkv, 0, QKV_WIDTH), k = view(qkv, p.H, QKV_WIDTH), v = view(qkv, p.H + p.K, QKV_WIDTH), y = view(heads, 0, C);
        megatoken_attention_forward(p.dtype, &q, &k, &v, &y, lse, p.B, p.H, p.K, p.T, p.T, p.D, true);
        linear(heads, C, OUT, part, C);
        norm(x, part, middle, NORM2, norm2, mean2, scale2);
        linear(norm2, C, UP, up, F);
        if (has_gate) {
            linear(norm2, C, GATE, gate, F);
            megatoken_swiglu_forward(p.dtype, gate, up, hidden, N * F);
        } else megatoken_gelu_forward(p.dtype, up, hidden, N * F);
        linear(hidden, F, DOWN, part, C);
        constexpr Index ROWS = 64;
        parallel_for((N + ROWS - 1) / ROWS, [=, *this](Index block) {
            T* y = (T*)p.y;
            for (Index i = block * ROWS * C, end = std::min(N, (block + 1) * ROWS) * C; i < end; i++)
                y[i] = round_to<T>(to_float(middle[i]) + to_float(part[i]));
        });
    }

    void backward() const {
        scratch.rewind();
        const T* dy = (const T*)p.dy;
        T *dhidden = scratch.take<T>(N * F), *dgate = has_gate ? scratch.take<T>(N * F) : nullptr, *dnorm = scratch.take<T>(N * C);
        T *dmiddle = scratch.take<T>(N * C), *dheads = scratch.take<T>(N * C), *dqkv = scratch.take<T>(N * QKV_WIDTH);
        linear_backward(dy, C, DOWN, hidden, F, dhidden);
        if (has_gate) {
            megatoken_swiglu_backward(p.dtype, dhidden, gate, up, dgate, dhidden, N * F);
            linear_backward(dgate, F, GATE, norm2, C, dnorm);
        } else megatoken_gelu_backward(p.dtype, dhidden, up, dhidden, N * F);
        linear_backward(dhidden, F, UP, norm2, C, dnorm, has_gate);
        norm_backward(dnorm, middle, NORM2, mean2, scale2, dy, dmiddle);
        linear_backward(dmiddle, C, OUT, heads, C, dheads);
        const View q = view(qkv, 0, QKV_WIDTH), k = view(qkv, p.H, QKV_WIDTH), v = view(qkv, p.H + p.K, QKV_WIDTH);
        const View dq = view(dqkv, 0, QKV_WIDTH), dk = view(dqkv, p.H, QKV_WIDTH), dv = view(dqkv, p.H + p.K, QKV_WIDTH);
        const View y = view(heads, 0, C), dy_heads = view(dheads, 0, C);
        megatoken_attention_backward(p.dtype, &q, &k, &v, &y, &dy_heads, lse, &dq, &dk, &dv, p.B, p.H, p.K, p.T, p.D);
        rotate(dqkv, true);
        linear_backward(dqkv, QKV_WIDTH, QKV, norm1, C, dnorm);
        norm_backward(dnorm, x, NORM1, mean1, scale1, dmiddle, (T*)p.dx);
    }
};

}  // namespace

EXPORT void megatoken_block_forward(const Block* block) {
    with_type(block->dtype, [&](auto t) { BlockPass<decltype(t)>{*block}.forward(); });
}

EXPORT void megatoken_block_backward(const Block* block) {
    with_type(block->dtype, [&](auto t) { BlockPass<decltype(t)>{*block}.backward(); });
}
