// Products of two packed panels into a small block of fp32, the inner part of every matrix product and of attention.
//
// A panel holds MR rows of A, or NR columns of B, for all of a stretch of K, in the order in which `block_product`
// reads them; rows, columns and K that do not fill it are zero. Which order that is, and which element type, belongs to
// the instruction set: nobody else looks into a panel. A panel is a sequence of steps of K_STEP values of k, so that a part
// of it, from a multiple of K_STEP on, is a panel too: its first element is at a_size or b_size of the k values before.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

#include "common.h"

#if defined(__AMX_BF16__) || defined(MEGATOKEN_EMULATE_AMX)
#include "products_amx.h"
#else
inline void prepare_products() {}  // to be called in a thread before its products
#endif

#if defined(__AVX2__) && defined(__FMA__)
#include "products_vector.h"
#else

// The portable form, also the reference of the others: fp32 panels [k][MR] and [k][NR], vectorized by the compiler.
template <class T> constexpr bool HAS_PAIR_DOT = false;

template <class T> struct Panel {
    using Element = float;
    static constexpr Index MR = 4, NR = 16, K_STEP = 1;
    static constexpr bool UNPACKED_A = false;
    static Index a_size(Index k) { return k * MR; }  // elements of a panel of A; b_size of B
    static Index b_size(Index k) { return k * NR; }
};

// Rows `a[i * row_stride + p * k_stride]`, i < rows <= MR, p < k.
template <class T> void pack_a(const T* a, Index row_stride, Index k_stride, Index rows, Index k, typename Panel<T>::Element* panel) {
    constexpr Index MR = Panel<T>::MR;
    for (Index p = 0; p < k; p++)
        for (Index i = 0; i < MR; i++) panel[p * MR + i] = i < rows ? to_float(a[i * row_stride + p * k_stride]) : 0.0f;
}

// Columns `b[p * k_stride + j * col_stride]`, p < k, j < cols <= NR.
template <class T> void pack_b(const T* b, Index k_stride, Index col_stride, Index cols, Index k, typename Panel<T>::Element* panel) {
    constexpr Index NR = Panel<T>::NR;
    for (Index p = 0; p < k; p++)
        for (Index j = 0; j < NR; j++) panel[p * NR + j] = j < cols ? to_float(b[p * k_stride + j * col_stride]) : 0.0f;
}

// c (MR x NR, row stride ldc) = [c +] A B over k; c is written whole, or from row `rows` on perhaps not.
template <class T>
void block_product(const typename Panel<T>::Element* a, const typename Panel<T>::Element* b, Index k, float* c, Index ldc, bool accumulate,
                   Index = Panel<T>::MR) {
    constexpr Index MR = Panel<T>::MR, NR = Panel<T>::NR;
    float sum[MR][NR];
    for (Index i = 0; i < MR; i++)
        for (Index j = 0; j < NR; j++) sum[i][j] = accumulate ? c[i * ldc + j] : 0.0f;
    for (Index p = 0; p < k; p++)
        for (Index i = 0; i < MR; i++)
            for (Index j = 0; j < NR; j++) sum[i][j] += a[p * MR + i] * b[p * NR + j];
    for (Index i = 0; i < MR; i++)
        for (Index j = 0; j < NR; j++) c[i * ldc + j] = sum[i][j];
}

#endif

// Where Panel<T>::UNPACKED_A: the product with MR rows of A as they lie in memory, k contiguous, a multiple of K_STEP.
template <class T>
void unpacked_product(const T* a, Index row_stride, const typename Panel<T>::Element* b, Index k, float* c, Index ldc, bool accumulate);

// N values of a row, rounded.
template <Index N> inline void round_row(const float* x, float* y) { std::copy_n(x, N, y); }
template <Index N> inline void round_row(const float* x, bf16* y) {
#ifdef __AVX512BF16__
    for (Index i = 0; i < N; i += 2 * LANES) {
        const __m512bh rounded = _mm512_cvtne2ps_pbh(load_vector<__m512>(x + i + LANES), load_vector<__m512>(x + i));
        __builtin_memcpy(y + i, &rounded, sizeof rounded);
    }
#else
    for (Index i = 0; i < N; i++) y[i] = round_to<bf16>(x[i]);
#endif
}
