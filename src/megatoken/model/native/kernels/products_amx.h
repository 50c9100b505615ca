// bf16 matmul with AMX tiles (Intel's manual, volume 1, chapter 18): a block of 32 x 32 sums is four tiles.
//
// A tile has 16 rows of 16 lanes of 32 bits; in A and B, a lane is a pair of bf16 values with consecutive k. A step of a
// panel is 32 values of k: two tiles of A, [row][pair], for rows 0-15 and 16-31, or two tiles of B, [pair][column].
#pragma once
#include "products_vector.h"

#ifdef MEGATOKEN_EMULATE_AMX  // for tests on processors without AMX
struct Tile {
    Lane lanes[16][16];
};
inline thread_local Tile tiles[8];
inline bool request_tiles() { return true; }
inline void prepare_products() {}
inline void tile_zero(int t) { tiles[t] = {}; }
inline void tile_load(int t, const void* p, Index stride) {
    for (int i = 0; i < 16; i++) __builtin_memcpy(tiles[t].lanes[i], (const char*)p + i * stride, 64);
}
inline void tile_store(int t, void* p, Index stride) {
    for (int i = 0; i < 16; i++) __builtin_memcpy((char*)p + i * stride, tiles[t].lanes[i], 64);
}
inline void tile_multiply_add(int c, int a, int b) {  // TDPBF16PS sums even and odd k separately
    for (int i = 0; i < 16; i++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) {
                const Lane x = tiles[a].lanes[i][k], y = tiles[b].lanes[k][j];
                even[j] += __builtin_bit_cast(float, x << 16) * __builtin_bit_cast(float, y << 16);
                odd[j] += __builtin_bit_cast(float, x & 0xffff0000) * __builtin_bit_cast(float, y & 0xffff0000);
            }
        for (int j = 0; j < 16; j++)
            tiles[c].lanes[i][j] = __builtin_bit_cast(Lane, __builtin_bit_cast(float, tiles[c].lanes[i][j]) + (even[j] + odd[j]));
    }
}
#else
#include <sys/syscall.h>
#include <unistd.h>

// Asks Linux for tiles; returns whether it grants them. Without the grant, tile instructions kill the process.
inline bool request_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return granted;
}

// Each thread must call it before block_product, because other code may have configured the tiles.
inline void prepare_products() {
    request_tiles();
    // Static, because the compiler does not know that the intrinsic reads all of it.
    alignas(64) static constexpr struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    _tile_loadconfig(&config);
}
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, p, stride) _tile_loadd(t, p, stride)
#define tile_store(t, p, stride) _tile_stored(t, p, stride)
#define tile_multiply_add(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

template <> struct Panel<bf16> {
    using Element = Lane;
    static constexpr Index MR = 32, NR = 32, K_STEP = 32;
    static constexpr bool UNPACKED_A = false;
    static Index a_size(Index k) { return (k + 31) / 32 * 512; }
    static Index b_size(Index k) { return (k + 31) / 32 * 512; }
};

// Packs 32 rows of A (if BY_ROWS) or columns of B, which are `stride` apart in memory.
template <bool BY_ROWS> void pack_tiles(const bf16* source, Index stride, Index k_stride, Index width, Index k, Lane* panel) {
    for (Index p = 0; p < k; p += 32)
        for (Index first = 0; first < 32; first += 16, panel += 256) {
            const bf16* corner = source + first * stride + p * k_stride;
            const Index count = std::clamp(width - first, Index(0), Index(16)), n = std::min(Index(32), k - p);
            Lanes lanes[16];  // if k is contiguous, each holds a row or column; otherwise a pair of k
            if (k_stride == 1) {
                for (Index i = 0; i < 16; i++) __builtin_prefetch(corner + i * stride + 128);
                for (Index i = 0; i < 16; i++)
                    lanes[i] = i < count ? (Lanes)_mm512_maskz_loadu_epi16((1ull << n) - 1, corner + i * stride) : Lanes{};
            } else if (stride == 1) {
                for (Index i = 0; i < 16; i++) {
                    if (2 * i + 1 < n) lanes[i] = PairLane::across(corner + 2 * i * k_stride, k_stride, count);
                    else lanes[i] = 2 * i < n ? __builtin_convertvector(load_halves(corner + 2 * i * k_stride, count), Lanes) : Lanes{};
                }
            } else {
                for (Index i = 0; i < 16; i++)
                    for (Index j = 0; j < 16; j++)
                        lanes[i][j] = j < count && 2 * i < n ? PairLane::lane(corner + j * stride + 2 * i * k_stride, k_stride, n - 2 * i) : 0;
            }
            if ((k_stride == 1) != BY_ROWS) transpose(lanes);
            for (Index i = 0; i < 16; i++) store_lanes(panel + 16 * i, lanes[i], 16);
        }
}

template <> inline void pack_a<bf16>(const bf16* a, Index row_stride, Index k_stride, Index rows, Index k, Lane* panel) {
    pack_tiles<true>(a, row_stride, k_stride, rows, k, panel);
}

template <> inline void pack_b<bf16>(const bf16* b, Index k_stride, Index col_stride, Index cols, Index k, Lane* panel) {
    pack_tiles<false>(b, col_stride, k_stride, cols, k, panel);
}

template <> inline void block_product<bf16>(const Lane* a, const Lane* b, Index k, float* c, Index ldc, bool accumulate, Index) {
    asm volatile("" ::: "memory");  // the compiler does not know that the intrinsics read memory
    float* below = c + 16 * ldc;
    if (accumulate) {
        tile_load(0, c, 4 * ldc);
        tile_load(1, c + 16, 4 * ldc);
        tile_load(2, below, 4 * ldc);
        tile_load(3, below + 16, 4 * ldc);
    } else {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
    for (Index p = 0; p < k; p += 32, a += 512, b += 512) {
        tile_load(4, a, 64);
        tile_load(6, b, 64);
        tile_multiply_add(0, 4, 6);
        tile_load(7, b + 256, 64);
        tile_multiply_add(1, 4, 7);
        tile_load(5, a + 256, 64);
        tile_multiply_add(2, 5, 6);
        tile_multiply_add(3, 5, 7);
        for (Index line = 512; line < 1024; line += 16) {  // prefetch the next step
            __builtin_prefetch(a + line);
            __builtin_prefetch(b + line);
        }
    }
    tile_store(0, c, 4 * ldc);
    tile_store(1, c + 16, 4 * ldc);
    tile_store(2, below, 4 * ldc);
    tile_store(3, below + 16, 4 * ldc);
}
