// Matmul with vectors: FMA on fp32 panels with AVX2 or AVX-512, VDPBF16PS on bf16 panels with AVX512-BF16.
//
// A panel is a sequence of steps, each of MR (A) or NR (B) lanes of 32 bits. A lane is an fp32 value or a pair of bf16
// values with consecutive k, whose products one instruction adds to the same sum; a last k without a partner is paired
// with zero. In each step, a lane of every row of A is broadcast and multiplied with the vectors of B. The sums of all
// rows and vectors stay in registers.
#pragma once
#include <immintrin.h>

using Lane = uint32_t;

#ifdef __AVX512F__
constexpr Index LANES = 16, VECTOR_MR = 12, VECTOR_NR = 32;  // 24 of 32 registers hold sums
#else
constexpr Index LANES = 8, VECTOR_MR = 6, VECTOR_NR = 16;  // 12 of 16 registers hold sums
#endif

typedef Lane Lanes __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), may_alias));

template <class V> inline V load_vector(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
// Loads the first `count` values, and zeros for the rest.
inline Lanes load_lanes(const float* p, Index count) {
    if (count == LANES) return load_vector<Lanes>(p);
#ifdef __AVX512F__
    return (Lanes)_mm512_maskz_loadu_epi32((1 << count) - 1, p);
#else
    // A row of A, with two instructions instead of a copy through the stack.
    if (count == VECTOR_MR) return (Lanes)_mm256_setr_m128i(_mm_loadu_si128((const __m128i*)p), _mm_loadl_epi64((const __m128i*)(p + 4)));
    Lanes v = {};
    __builtin_memcpy(&v, p, 4 * count);
    return v;
#endif
}
inline Halves load_halves(const bf16* p, Index count) {
    if (count == LANES) return load_vector<Halves>(p);
#ifdef __AVX512BW__
    return (Halves)_mm256_maskz_loadu_epi16((1 << count) - 1, p);
#else
    Halves v = {};
    __builtin_memcpy(&v, p, 2 * count);
    return v;
#endif
}
inline void store_lanes(Lane* p, Lanes v, Index count) {
    if (count == LANES) __builtin_memcpy(p, &v, sizeof v);
    else
#ifdef __AVX512F__
        _mm512_mask_storeu_epi32(p, (1 << count) - 1, (__m512i)v);
#else
    if (count == VECTOR_MR) {
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128((__m256i)v));
        _mm_storel_epi64((__m128i*)(p + 4), _mm256_extracti128_si256((__m256i)v, 1));
    } else __builtin_memcpy(p, &v, 4 * count);
#endif
}

// Operations on lanes. A lane holds K values of k; `along` loads lanes that follow each other in k, `across` lanes of
// different rows or columns; `lane` loads a single one.
struct Fp32Lane {
    static constexpr Index K = 1;
    static Lanes along(const float* p) { return load_vector<Lanes>(p); }
    static Lanes along(const bf16* p) { return across(p, 0, LANES); }
    static Lanes across(const float* p, Index, Index count) { return load_lanes(p, count); }
    static Lanes across(const bf16* p, Index, Index count) { return __builtin_convertvector(load_halves(p, count), Lanes) << 16; }
    template <class T> static Lane lane(const T* p, Index, Index) { return __builtin_bit_cast(Lane, to_float(*p)); }
#ifdef __AVX512F__
    using Sum = __m512;
    static Sum multiply_add(Lanes a, Lanes b, Sum sum) { return _mm512_fmadd_ps((Sum)a, (Sum)b, sum); }
#else
    using Sum = __m256;
    static Sum multiply_add(Lanes a, Lanes b, Sum sum) { return _mm256_fmadd_ps((Sum)a, (Sum)b, sum); }
#endif
};

#ifdef __AVX512BF16__
struct PairLane {
    static constexpr Index K = 2;
    using Sum = __m512;
    static Lanes along(const bf16* p) { return load_vector<Lanes>(p); }
    static Lanes across(const bf16* p, Index k_stride, Index count) {
        const Lanes first = __builtin_convertvector(load_halves(p, count), Lanes);
        return first | __builtin_convertvector(load_halves(p + k_stride, count), Lanes) << 16;
    }
    static Lane lane(const bf16* p, Index k_stride, Index k) { return p->bits | (k > 1 ? Lane(p[k_stride].bits) << 16 : 0); }
    static Sum multiply_add(Lanes a, Lanes b, Sum sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
template <class T> using LaneOf = std::conditional_t<std::is_same_v<T, bf16>, PairLane, Fp32Lane>;

// The dot product of n values, as fast as they can be read from memory.
template <class T> constexpr bool HAS_PAIR_DOT = std::is_same_v<T, bf16>;
inline float pair_dot(const bf16* x, const bf16* y, Index n) {
    constexpr Index PAIRS = 2 * LANES, SUMS = 4;
    __m512 sum[SUMS] = {};
    Index p = 0;
    for (; p + SUMS * PAIRS <= n; p += SUMS * PAIRS)
#pragma GCC unroll 4
        for (Index i = 0; i < SUMS; i++)
            sum[i] = PairLane::multiply_add(PairLane::along(x + p + i * PAIRS), PairLane::along(y + p + i * PAIRS), sum[i]);
    for (; p < n; p += PAIRS) {
        const __mmask32 mask = n - p < PAIRS ? (1u << (n - p)) - 1 : ~0u;
        sum[0] = PairLane::multiply_add((Lanes)_mm512_maskz_loadu_epi16(mask, x + p), (Lanes)_mm512_maskz_loadu_epi16(mask, y + p), sum[0]);
    }
    const __m512 sums = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (Index i = 0; i < LANES; i++) total += sums[i];
    return total;
}
#else
template <class T> using LaneOf = Fp32Lane;
template <class T> constexpr bool HAS_PAIR_DOT = false;
#endif

// Transposes LANES rows of LANES lanes. Each of log2(LANES) rounds interleaves row i with row i + LANES / 2, which rotates
// the bits of each value's index, (row, lane), by one.
template <size_t... I> inline Lanes interleave(Lanes a, Lanes b, size_t first, std::index_sequence<I...>) {
    return first ? __builtin_shufflevector(a, b, (LANES / 2 + I / 2 + I % 2 * LANES)...) : __builtin_shufflevector(a, b, (I / 2 + I % 2 * LANES)...);
}
inline void transpose(Lanes (&rows)[LANES]) {
    constexpr auto lanes = std::make_index_sequence<LANES>();
#pragma GCC unroll 4
    for (Index round = 1; round < LANES; round *= 2) {
        Lanes mixed[LANES];
        for (Index i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = interleave(rows[i], rows[i + LANES / 2], 0, lanes);
            mixed[2 * i + 1] = interleave(rows[i], rows[i + LANES / 2], 1, lanes);
        }
        for (Index i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

// Packs what `pack_lanes` could not pack with vectors, one lane at a time.
template <Index WIDTH, class T>
__attribute__((noinline)) void pack_rest(const T* source, Index stride, Index k_stride, Index width, Index k, Index step, Lane* panel) {
    using L = LaneOf<T>;
    for (Index p = step * L::K; p < k; p += L::K, step++)
        for (Index i = 0; i < WIDTH; i++)
            panel[step * WIDTH + i] = i < width ? L::lane(source + i * stride + p * k_stride, k_stride, k - p) : 0;
}

// Packs `width` rows of A or columns of B, `stride` apart in memory, into a panel with WIDTH lanes per step.
template <Index WIDTH, class T> void pack_lanes(const T* source, Index stride, Index k_stride, Index width, Index k, Lane* panel) {
    using L = LaneOf<T>;
    Index done = 0;  // number of steps packed
    if (k_stride == 1) {
        for (; (done + LANES) * L::K <= k; done += LANES)
            for (Index first = 0; first < WIDTH; first += LANES) {
                Lanes lanes[LANES];
                for (Index i = 0; i < LANES; i++) __builtin_prefetch(source + (first + i) * stride + (done + 4 * LANES) * L::K);
                for (Index i = 0; i < LANES; i++)
                    lanes[i] = first + i < width ? L::along(source + (first + i) * stride + done * L::K) : Lanes{};
                transpose(lanes);
                for (Index i = 0; i < LANES; i++)
                    store_lanes(panel + (done + i) * WIDTH + first, lanes[i], std::min(LANES, WIDTH - first));
            }
    } else if (stride == 1) {
        for (; (done + 1) * L::K <= k; done++)
            for (Index first = 0; first < WIDTH; first += LANES) {
                const T* values = source + done * L::K * k_stride + first;
                const Index count = std::max(Index(0), std::min(LANES, width - first));
                store_lanes(panel + done * WIDTH + first, L::across(values, k_stride, count), std::min(LANES, WIDTH - first));
            }
    }
    if (done * L::K < k) pack_rest<WIDTH>(source, stride, k_stride, width, k, done, panel);
}

template <class T> struct Panel {
    using Element = Lane;
    static constexpr Index MR = VECTOR_MR, NR = VECTOR_NR, K_STEP = LaneOf<T>::K;
    static constexpr bool UNPACKED_A = sizeof(T) * K_STEP == sizeof(Lane);
    static Index a_size(Index k) { return (k + LaneOf<T>::K - 1) / LaneOf<T>::K * MR; }
    static Index b_size(Index k) { return (k + LaneOf<T>::K - 1) / LaneOf<T>::K * NR; }
};

template <class T> void pack_a(const T* a, Index row_stride, Index k_stride, Index rows, Index k, Lane* panel) {
    pack_lanes<Panel<T>::MR>(a, row_stride, k_stride, rows, k, panel);
}

template <class T> void pack_b(const T* b, Index k_stride, Index col_stride, Index cols, Index k, Lane* panel) {
    pack_lanes<Panel<T>::NR>(b, col_stride, k_stride, cols, k, panel);
}

// Computes the first ROWS rows of a block. In A, rows are `row_bytes` apart, and steps `step_bytes`.
template <class T, Index ROWS>
inline __attribute__((always_inline)) void multiply_rows(const void* a, Index row_bytes, Index step_bytes, const Lane* b, Index k, float* c,
                                                         Index ldc, bool accumulate) {
    using L = LaneOf<T>;
    using Sum = typename L::Sum;
    constexpr Index VECTORS = Panel<T>::NR / LANES;
    const char* step_of_a = (const char*)a;
    Sum sum[ROWS][VECTORS] = {};
    for (Index step = 0; step < (k + L::K - 1) / L::K; step++, step_of_a += step_bytes, b += VECTORS * LANES) {
        Lanes columns[VECTORS];
#pragma GCC unroll 2
        for (Index j = 0; j < VECTORS; j++) columns[j] = load_vector<Lanes>(b + j * LANES);
#pragma GCC unroll 32
        for (Index i = 0; i < ROWS; i++) {
            const Lanes row = Lanes{} + load_vector<Lane>(step_of_a + i * row_bytes);
#pragma GCC unroll 2
            for (Index j = 0; j < VECTORS; j++) sum[i][j] = L::multiply_add(row, columns[j], sum[i][j]);
        }
    }
    // Store through a vector pointer, because memcpy would take the address of sums and so keep them in memory.
    typedef float InMemory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#pragma GCC unroll 32
    for (Index i = 0; i < ROWS; i++, c += ldc)
#pragma GCC unroll 2
        for (Index j = 0; j < VECTORS; j++) {
            InMemory* to = (InMemory*)(c + j * LANES);
            *to = accumulate ? *to + sum[i][j] : sum[i][j];
        }
}

template <class T, Index ROWS>
__attribute__((noinline)) void row_products(const Lane* a, const Lane* b, Index k, float* c, Index ldc, bool accumulate) {
    multiply_rows<T, ROWS>(a, sizeof(Lane), Panel<T>::MR * sizeof(Lane), b, k, c, ldc, accumulate);
}

template <class T> void block_product(const Lane* a, const Lane* b, Index k, float* c, Index ldc, bool accumulate, Index rows = Panel<T>::MR) {
    constexpr Index MR = Panel<T>::MR, THIRD = MR / 3;
    if (rows > 2 * THIRD) row_products<T, MR>(a, b, k, c, ldc, accumulate);
    else if (rows > THIRD) row_products<T, 2 * THIRD>(a, b, k, c, ldc, accumulate);
    else row_products<T, THIRD>(a, b, k, c, ldc, accumulate);
}

template <class T>
__attribute__((noinline)) void unpacked_product(const T* a, Index row_stride, const Lane* b, Index k, float* c, Index ldc, bool accumulate) {
    multiply_rows<T, Panel<T>::MR>(a, row_stride * sizeof(T), sizeof(Lane), b, k, c, ldc, accumulate);
}
