// Multiplication of two packed panels into a small block of fp32: the inner loop of all matmuls and of attention.
//
// A panel holds MR rows of A or NR columns of B, over a range of k, in the order in which `block_product` reads them,
// padded with zeros. The order and the element type depend on the instruction set and are private to its products*.h. A
// panel is a sequence of steps of K_STEP values of k, so the part of a panel that starts at a multiple k of K_STEP is a
// panel too; it begins at element a_size(k) or b_size(k).
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

#include "common.h"

#if defined(__AMX_BF16__) || defined(MEGATOKEN_EMULATE_AMX)
#include "products_amx.h"
#else
inline bool request_tiles() { return false; }
inline void prepare_products() {}  // each thread must call it before block_product
#endif

#if defined(__AVX2__) && defined(__FMA__)
#include "products_vector.h"
#else

// The portable version, also the reference for the others: fp32 panels [k][MR] and [k][NR], vectorized by the compiler.
template <class T> constexpr bool HAS_PAIR_DOT = false;

template <class T> struct Panel {
    using Element = float;
    static constexpr Index MR = 4, NR = 16, K_STEP = 1;
    static constexpr bool UNPACKED_A = false;
    static Index a_size(Index k) { return k * MR; }  // elements in a panel of A with k values; b_size: of B
    static Index b_size(Index k) { return k * NR; }
};

// Packs rows of A, a[i * row_stride + p * k_stride] for i < rows <= MR and p < k.
template <class T> void pack_a(const T* a, Index row_stride, Index k_stride, Index rows, Index k, typename Panel<T>::Element* panel) {
    constexpr Index MR = Panel<T>::MR;
    for (Index p = 0; p < k; p++)
        for (Index i = 0; i < MR; i++) panel[p * MR + i] = i < rows ? to_float(a[i * row_stride + p * k_stride]) : 0.0f;
}

// Packs columns of B, b[p * k_stride + j * col_stride] for p < k and j < cols <= NR.
template <class T> void pack_b(const T* b, Index k_stride, Index col_stride, Index cols, Index k, typename Panel<T>::Element* panel) {
    constexpr Index NR = Panel<T>::NR;
    for (Index p = 0; p < k; p++)
        for (Index j = 0; j < NR; j++) panel[p * NR + j] = j < cols ? to_float(b[p * k_stride + j * col_stride]) : 0.0f;
}

// c (MR x NR, row stride ldc) = A B, or c += A B if accumulate, over k values. Rows of c from `rows` on may stay unwritten.
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

// block_product with MR rows of A that are not packed; k is contiguous and a multiple of K_STEP. Only if Panel<T>::UNPACKED_A.
template <class T>
void unpacked_product(const T* a, Index row_stride, const typename Panel<T>::Element* b, Index k, float* c, Index ldc, bool accumulate);

// Copies N values of a row, rounded to the type of y.
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
