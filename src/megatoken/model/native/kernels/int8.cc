// A linear layer for few rows with 8-bit weights, for decoding, which spends its time on reading weights.
//
// W (O, I) is int8 values times a scale for each row. Each row of x is rounded to integers as well, with as many bits as
// keep 32-bit sums exact: at least 13, and 15 for rows of 768 values. W is read in memory order, because reading several of
// its rows at once would halve the bandwidth.
#include "common.h"
#include "scratch.h"
#include "threads.h"

namespace {

constexpr Index ROWS = 4, CHUNK = 4096;  // rows of x at once; products per 32-bit sum

thread_local Scratch scratch;

// Rounds x to `integers`; returns the scale, x = integers * scale, or NaN if a value of x is not finite.
template <class T> float round_to_integers(const T* x, Index K, int16_t* integers) {
    float top = 0, invalid = 0;
#pragma omp simd reduction(max : top) reduction(+ : invalid)
    for (Index p = 0; p < K; p++) {
        top = std::max(top, std::abs(to_float(x[p])));
        invalid += to_float(x[p]) * 0.0f;
    }
    // The largest integer with which the sum of K products with int8 values stays below 2^31.
    const float largest = float(std::min(Index(INT16_MAX), Index(INT32_MAX) / (128 * std::clamp(K, Index(1), CHUNK))));
    const float factor = top > 0 && invalid == 0 ? largest / std::max(top, 1e-30f) : 0.0f;
    for (Index p = 0; p < K; p++) integers[p] = int16_t(int32_t(__builtin_rintf(factor > 0 ? to_float(x[p]) * factor : 0.0f)));
    return invalid == 0 ? std::max(top, 1e-30f) / largest : invalid;
}

// y (M, O) = x W^T + bias, where x is given as integers (M, K) and a scale for each row.
template <Index M, class T>
void multiply(const int16_t* x, const float* x_scales, const int8_t* values, const float* scales, const T* bias, T* y, Index K, Index O) {
    const int16_t *x1 = x + (M > 1) * K, *x2 = x1 + (M > 2) * K, *x3 = x2 + (M > 3) * K;
    const Index outputs = (O - 1) / (8 * pool().threads()) + 1;  // rows of W per task
    parallel_for((O + outputs - 1) / outputs, [=](Index task) {
        for (Index o = task * outputs; o < std::min(O, (task + 1) * outputs); o++) {
            const int8_t* w = values + o * K;
            float sums[ROWS] = {};
            for (Index first = 0; first < K; first += CHUNK) {
                const Index end = std::min(K, first + CHUNK);
                int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;  // integer sums, which the compiler may reorder
                for (Index p = first; p < end; p++) {
                    const int16_t value = w[p];
                    s0 += value * x[p];
                    if (M > 1) s1 += value * x1[p];
                    if (M > 2) s2 += value * x2[p];
                    if (M > 3) s3 += value * x3[p];
                }
                const int32_t parts[] = {s0, s1, s2, s3};
                for (Index i = 0; i < M; i++) sums[i] += float(parts[i]);
            }
            const float added = bias ? to_float(bias[o]) : 0.0f;
            for (Index i = 0; i < M; i++) y[i * O + o] = round_to<T>(sums[i] * (x_scales[i] * scales[o]) + added);
        }
    });
}

}  // namespace

// y (M, O) = x (M, I) W^T + bias. x, y and bias (null for none) have the same type; rows are contiguous.
EXPORT void megatoken_int8_linear(DType dtype, const void* x, const int8_t* values, const float* scales, const void* bias, void* y, Index M,
                                  Index I, Index O) {
    scratch.rewind();
    int16_t* integers = scratch.take<int16_t>(ROWS * I);
    float x_scales[ROWS];
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        for (Index first = 0; first < M; first += ROWS) {
            const Index rows = std::min(ROWS, M - first);
            for (Index i = 0; i < rows; i++) x_scales[i] = round_to_integers((const T*)x + (first + i) * I, I, integers + i * I);
            const auto product = rows == 1 ? multiply<1, T> : rows == 2 ? multiply<2, T> : rows == 3 ? multiply<3, T> : multiply<4, T>;
            product(integers, x_scales, values, scales, (const T*)bias, (T*)y + first * O, I, O);
        }
    });
}
