// The AVX512-BF16 instructions of the kernels in AVX-512, for processors without them: included before each source.
#pragma once
#include <immintrin.h>

// Rounds to the nearest even bf16, in the upper half of each lane; NaN stays NaN.
inline __m512i emulated_round(__m512 x) {
    const __m512i bits = (__m512i)x;
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_epi32(bits, _mm512_set1_epi32(0x400000));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
}
inline __m256i emulated_narrow(__m512 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(emulated_round(x), 16)); }
inline __m512i emulated_narrow2(__m512 upper, __m512 lower) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_narrow(lower)), emulated_narrow(upper), 1);
}
inline __m512 emulated_dot(__m512 sum, __m512i a, __m512i b) {  // the odd values' products first, as VDPBF16PS
    const __m512i odd = _mm512_set1_epi32(0xffff0000);
    sum = _mm512_fmadd_ps((__m512)_mm512_and_epi32(a, odd), (__m512)_mm512_and_epi32(b, odd), sum);
    return _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
}
#define __AVX512BF16__ 1
#define _mm512_cvtneps_pbh(x) ((__m256bh)emulated_narrow(x))
#define _mm512_cvtne2ps_pbh(upper, lower) ((__m512bh)emulated_narrow2(upper, lower))
#define _mm512_dpbf16_ps(sum, a, b) emulated_dot(sum, (__m512i)(a), (__m512i)(b))
