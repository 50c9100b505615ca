// Kernels that other kernels call, and their arguments, which are mirrored in library.py.
#pragma once
#include "common.h"

// A matrix with strides in elements, one of which is 1.
struct Matrix {
    void* data;
    Index row_stride, col_stride;
};

// C = alpha A B + bias + beta D
struct Matmul {
    DType dtype, out_dtype;  // of a, b and bias; of c and d
    Index M, N, K;
    Matrix a, b, c;          // rows of c are contiguous
    const void* bias;        // (N), or null
    const void* d;           // in the layout of c, may be c itself; or null
    float* row_sums;         // (M), receives the sums of A's rows, or null; if A = dy^T, they are the gradient of a bias
    float alpha = 1, beta = 1;
};

// A tensor (B, heads, rows, D) with strides in elements; D is contiguous.
struct View {
    void* data;
    Index batch_stride, head_stride, row_stride;

    template <class T> T* head(Index b, Index h) const { return (T*)data + b * batch_stride + h * head_stride; }
};

EXPORT void megatoken_matmul(const Matmul*);
EXPORT void megatoken_norm_forward(DType, const void* x, const void* residual, void* stored, const void* weight, const void* bias, void* y,
                                   float* mean, float* scale, Index N, Index C, float eps, int32_t rms);
EXPORT void megatoken_norm_backward(DType, const void* dy, const void* residual, const void* x, const float* mean, const float* scale,
                                    const void* weight, void* dx, float* dweight, float* dbias, Index N, Index C, int32_t rms);
EXPORT void megatoken_gelu_forward(DType, const void* x, void* y, Index n);
EXPORT void megatoken_gelu_backward(DType, const void* dy, const void* x, void* dx, Index n);
EXPORT void megatoken_swiglu_forward(DType, const void* gate, const void* up, void* y, Index n);
EXPORT void megatoken_swiglu_backward(DType, const void* dy, const void* gate, const void* up, void* dgate, void* dup, Index n);
EXPORT void megatoken_attention_forward(DType, const View* q, const View* k, const View* v, const View* y, float* lse, Index B, Index H,
                                        Index K, Index T, Index S, Index D, int32_t causal);
EXPORT void megatoken_attention_backward(DType, const View* q, const View* k, const View* v, const View* y, const View* dy,
                                         const float* lse, const View* dq, const View* dk, const View* dv, Index B, Index H, Index K,
                                         Index T, Index D);
