// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), forward and backward.
//
// Shapes: N rows, C channels. Rows are contiguous. Sums are in fp32.
#include "kernels.h"
#include "scratch.h"
#include "threads.h"

namespace {

thread_local Scratch scratch, sums;

constexpr Index ROWS = 64;  // rows per block; each block has one partial sum of the weight gradients

// y = (x - mean) * scale * weight + bias; RMSNorm has no mean and no bias. With `residual`, the
// sum x + residual is stored and normalized in place of x.
template <class T>
void norm_forward(const T* x, const T* residual, T* stored, const T* weight, const T* bias, T* y, float* mean, float* scale, Index N,
                  Index C, float eps, bool rms) {
    parallel_for((N + ROWS - 1) / ROWS, [=](Index block) {
        scratch.rewind();
        float* r = scratch.take<float>(C);
        for (Index n = block * ROWS; n < std::min(N, (block + 1) * ROWS); n++) {
            const T* xn = x + n * C;
            T* yn = y + n * C;
            if (residual) {
#pragma GCC ivdep
                for (Index c = 0; c < C; c++) stored[n * C + c] = round_to<T>(to_float(xn[c]) + to_float(residual[n * C + c]));
                xn = stored + n * C;
            }
            float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
            for (Index c = 0; c < C; c++) {
                r[c] = to_float(xn[c]);
                sum += r[c];
            }
            const float m = rms ? 0.0f : sum / C;
#pragma omp simd reduction(+ : squares)
            for (Index c = 0; c < C; c++) squares += (r[c] - m) * (r[c] - m);
            const float s = 1.0f / std::sqrt(squares / C + eps);
            if (bias)
#pragma GCC ivdep
                for (Index c = 0; c < C; c++) yn[c] = round_to<T>((r[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
            else
#pragma GCC ivdep
                for (Index c = 0; c < C; c++) yn[c] = round_to<T>((r[c] - m) * s * to_float(weight[c]));
            mean[n] = m;
            scale[n] = s;
        }
    });
}

// dx = scale * (g - mean(g) - h * mean(g * h)) with h = (x - mean) * scale and g = dy * weight; RMSNorm leaves out mean(g).
// `residual`, if not null, is added to dx.
template <class T>
void norm_backward(const T* dy, const T* residual, const T* x, const float* mean, const float* scale, const T* weight, T* dx,
                   float* dweight, float* dbias, Index N, Index C, bool rms) {
    const Index blocks = (N + ROWS - 1) / ROWS;
    sums.rewind();
    float* partial = sums.take<float>(2 * blocks * C);
    parallel_for(blocks, [=](Index block) {
        scratch.rewind();
        float *h = scratch.take<float>(2 * C), *g = h + C;
        float *dw = partial + 2 * block * C, *db = dw + C;
        std::fill_n(dw, 2 * C, 0.0f);
        for (Index n = block * ROWS; n < std::min(N, (block + 1) * ROWS); n++) {
            const T *dyn = dy + n * C, *xn = x + n * C;
            T* dxn = dx + n * C;
            const float m = mean[n], s = scale[n];
            float sum_g = 0, sum_gh = 0;
#pragma omp simd reduction(+ : sum_g, sum_gh)
            for (Index c = 0; c < C; c++) {
                const float d = to_float(dyn[c]);
                h[c] = (to_float(xn[c]) - m) * s;
                dw[c] += d * h[c];
                db[c] += d;
                g[c] = d * to_float(weight[c]);
                sum_g += g[c];
                sum_gh += g[c] * h[c];
            }
            const float mean_g = rms ? 0.0f : sum_g / C, mean_gh = sum_gh / C;
#pragma GCC ivdep
            for (Index c = 0; c < C; c++) dxn[c] = round_to<T>(s * (g[c] - mean_g - h[c] * mean_gh));
            if (residual)
#pragma GCC ivdep
                for (Index c = 0; c < C; c++) dxn[c] = round_to<T>(to_float(dxn[c]) + to_float(residual[n * C + c]));
        }
    });
    std::fill_n(dweight, C, 0.0f);
    if (dbias) std::fill_n(dbias, C, 0.0f);
    for (Index block = 0; block < blocks; block++)
        for (Index c = 0; c < C; c++) {
            dweight[c] += partial[2 * block * C + c];
            if (dbias) dbias[c] += partial[(2 * block + 1) * C + c];
        }
}

}  // namespace

EXPORT void megatoken_norm_forward(DType dtype, const void* x, const void* residual, void* stored, const void* weight, const void* bias,
                                   void* y, float* mean, float* scale, Index N, Index C, float eps, int32_t rms) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        norm_forward((const T*)x, (const T*)residual, (T*)stored, (const T*)weight, (const T*)bias, (T*)y, mean, scale, N, C, eps, rms);
    });
}

EXPORT void megatoken_norm_backward(DType dtype, const void* dy, const void* residual, const void* x, const float* mean,
                                    const float* scale, const void* weight, void* dx, float* dweight, float* dbias, Index N, Index C,
                                    int32_t rms) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        norm_backward((const T*)dy, (const T*)residual, (const T*)x, mean, scale, (const T*)weight, (T*)dx, dweight, dbias, N, C, rms);
    });
}
