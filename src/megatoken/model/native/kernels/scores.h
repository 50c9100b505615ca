// Helpers of attention: pack blocks of fp32 scores as panels of columns, and store transposed results as rows.
#pragma once
#include "products.h"

// Whether panels are in fp32. If so, rows of NR fp32 scores are a panel of columns as they are; if not, panels are in bf16.
template <class T> constexpr bool fp32_panels = Panel<T>::K_STEP == 1;

#ifdef __AVX512BF16__
// The element of a panel of columns at which the pairs (k = p, k = p + 1) of columns j, ..., j + 15 begin.
template <class T> Index place_of_pairs(Index p, Index j) {
    if constexpr (Panel<T>::K_STEP == 2) return Panel<T>::b_size(p) + j;
    else return Panel<T>::b_size(p / 32 * 32) + j / 16 * 256 + p % 32 / 2 * 16;  // in an AMX tile
}
#endif

// Returns x, k rows of NR columns (row stride NR), as a panel of columns: packed into `panel`, or x itself if in fp32.
template <class T> const typename Panel<T>::Element* pack_scores(const float* x, [[maybe_unused]] Index k,
                                                                         [[maybe_unused]] typename Panel<T>::Element* panel) {
    if constexpr (fp32_panels<T>) return (const typename Panel<T>::Element*)x;
#ifdef __AVX512BF16__
    else {
        constexpr Index NR = Panel<T>::NR, STEP = Panel<T>::K_STEP;
        const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i pairs = _mm512_or_epi32(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
        for (Index p = 0; p < (k + STEP - 1) / STEP * STEP; p += 2)
            for (Index j = 0; j < NR; j += LANES) {
                const __m512 first = p < k ? load_vector<__m512>(x + p * NR + j) : __m512{};
                const __m512 second = p + 1 < k ? load_vector<__m512>(x + (p + 1) * NR + j) : __m512{};
                const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
                _mm512_storeu_si512(panel + place_of_pairs<T>(p, j), _mm512_permutexvar_epi16(pairs, halves));
            }
        return panel;
    }
#endif
}

// Packs n <= NR rows of NR values as the columns of a panel with NR values of k.
template <class T> void pack_scores_transposed(const float* x, Index n, typename Panel<T>::Element* panel) {
    constexpr Index NR = Panel<T>::NR;
    if constexpr (fp32_panels<T>) pack_b<float>(x, 1, NR, n, NR, panel);
#ifdef __AVX512BF16__
    else {
        static_assert(NR % (2 * LANES) == 0);
        for (Index i0 = 0; i0 < n; i0 += LANES)
            for (Index p = 0; p < NR; p += 2 * LANES) {
                Lanes lanes[LANES];
                for (Index i = 0; i < LANES; i++) {
                    const float* row = x + std::min(i0 + i, n - 1) * NR + p;  // columns from n on are never read
                    lanes[i] = (Lanes)_mm512_cvtne2ps_pbh(load_vector<__m512>(row + LANES), load_vector<__m512>(row));
                }
                transpose(lanes);
                for (Index i = 0; i < LANES; i++) store_lanes(panel + place_of_pairs<T>(p + 2 * i, i0), lanes[i], LANES);
            }
    }
#endif
}

#ifdef __AVX2__
template <class T> void store_lanes_times(const Lanes& x, float factor, T* out) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, bf16>) {
        const __m512 product = _mm512_mul_ps((__m512)x, _mm512_set1_ps(factor));
        return _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(product));
    }
#endif
    if constexpr (std::is_same_v<T, float>) return store_lanes((Lane*)out, (Lanes)((Fp32Lane::Sum)x * factor), LANES);
    float row[LANES];
    __builtin_memcpy(row, &x, sizeof row);
#pragma omp simd
    for (Index i = 0; i < LANES; i++) out[i] = round_to<T>(row[i] * factor);
}
#endif

// Stores x^T, n rows of D values, with row j multiplied by factor[j]. x is D x n, with row stride NR.
template <class T> void store_transposed(const float* x, Index D, Index n, const float* factor, T* out, Index out_stride) {
    constexpr Index NR = Panel<T>::NR;
    for (Index j = 0; j < n; j++)
        for (Index d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(out + j * out_stride + d, 1);
    Index d = 0;
#ifdef __AVX2__
    for (; d + LANES <= D; d += LANES)
        for (Index j0 = 0; j0 < n; j0 += LANES) {
            Lanes lanes[LANES];
            for (Index i = 0; i < LANES; i++) lanes[i] = load_vector<Lanes>(x + (d + i) * NR + j0);
            transpose(lanes);
            for (Index j = j0; j < std::min(n, j0 + LANES); j++) store_lanes_times(lanes[j - j0], factor[j], out + j * out_stride + d);
        }
#endif
    for (; d < D; d++)
        for (Index j = 0; j < n; j++) out[j * out_stride + d] = round_to<T>(x[d * NR + j] * factor[j]);
}
