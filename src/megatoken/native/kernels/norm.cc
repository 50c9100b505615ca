// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), forward and backward.
//
// Shapes: N rows, C channels. Rows are contiguous. Sums are in fp32.
#include <vector>

#include "common.h"

namespace {

constexpr Index ROWS = 64;  // rows per block; each block has one partial sum of the weight gradients

// y = (x - mean) * scale * weight + bias; RMSNorm has no mean and no bias.
template <class T>
void norm_forward(const T* x, const T* weight, const T* bias, T* y, float* mean, float* scale, Index N, Index C, float eps, bool rms) {
#pragma omp parallel
    {
        std::vector<float> row(C);
        float* r = row.data();
#pragma omp for schedule(static)
        for (Index n = 0; n < N; n++) {
            const T* xn = x + n * C;
            T* yn = y + n * C;
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
                for (Index c = 0; c < C; c++) yn[c] = round_to<T>((r[c] - m) * s * to_float(weight[c]) + to_float(bias[c]));
            else
                for (Index c = 0; c < C; c++) yn[c] = round_to<T>((r[c] - m) * s * to_float(weight[c]));
            mean[n] = m;
            scale[n] = s;
        }
    }
}

// dx = scale * (g - mean(g) - h * mean(g * h)) with h = (x - mean) * scale and g = dy * weight; RMSNorm leaves out mean(g).
template <class T>
void norm_backward(const T* dy, const T* x, const float* mean, const float* scale, const T* weight, T* dx, float* dweight, float* dbias,
                   Index N, Index C, bool rms) {
    const Index blocks = (N + ROWS - 1) / ROWS;
    std::vector<float> partial(2 * blocks * C, 0.0f);
#pragma omp parallel
    {
        std::vector<float> rows(2 * C);
        float *h = rows.data(), *g = h + C;
#pragma omp for schedule(static)
        for (Index block = 0; block < blocks; block++) {
            float *dw = partial.data() + 2 * block * C, *db = dw + C;
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
                for (Index c = 0; c < C; c++) dxn[c] = round_to<T>(s * (g[c] - mean_g - h[c] * mean_gh));
            }
        }
#pragma omp for schedule(static)
        for (Index c = 0; c < C; c++) {
            float dw = 0, db = 0;
            for (Index block = 0; block < blocks; block++) {
                dw += partial[2 * block * C + c];
                db += partial[(2 * block + 1) * C + c];
            }
            dweight[c] = dw;
            if (dbias) dbias[c] = db;
        }
    }
}

}  // namespace

EXPORT void megatoken_norm_forward(DType dtype, const void* x, const void* weight, const void* bias, void* y, float* mean, float* scale,
                                   Index N, Index C, float eps, int32_t rms) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        norm_forward((const T*)x, (const T*)weight, (const T*)bias, (T*)y, mean, scale, N, C, eps, rms);
    });
}

EXPORT void megatoken_norm_backward(DType dtype, const void* dy, const void* x, const float* mean, const float* scale, const void* weight,
                                    void* dx, float* dweight, float* dbias, Index N, Index C, int32_t rms) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        norm_backward((const T*)dy, (const T*)x, mean, scale, (const T*)weight, (T*)dx, dweight, dbias, N, C, rms);
    });
}
