// Matmul: C (M, N) = A (M, K) B (K, N); a tile of C is scaled and added to while it is in the cache.
//
// The smaller operand is packed once for all threads and stays in the shared cache. Of the larger one, a thread packs a
// few panels at a time (a unit) into its own L2 cache and multiplies them with all panels of the smaller one. If the
// instruction set allows, contiguous rows of A are read without packing. Up to K_BLOCK, two panels are multiplied over all
// of K at once. A longer K is divided into chunks, between which sums are kept in fp32, and the units into strips, so that
// the sums of a strip fit in the cache. Few rows, as in decoding, are multiplied without packing.
#include "kernels.h"
#include "products.h"
#include "scratch.h"
#include "threads.h"

namespace {

constexpr Index K_BLOCK = 3072, STRIP_BYTES = 16 << 20, UNIT_BYTES = 400 << 10, PACKED_ROWS = 32, FEW_ROWS = 4;

constexpr Index count(Index n, Index size) { return (n + size - 1) / size; }

thread_local Scratch scratch, own_scratch;

template <class T, class C> struct Product {
    using P = Panel<T>;
    using Element = typename P::Element;
    static constexpr Index MR = P::MR, NR = P::NR;

    const Matmul& m;
    const T *a = (const T*)m.a.data, *b = (const T*)m.b.data;
    float* bias = nullptr;  // in fp32, padded with zeros to whole panels

    // A as rows, or B as columns; `width` of them form a panel.
    struct Operand {
        bool is_a, unpacked;  // unpacked: A is read without packing, except for a last panel that is not full
        const T* data;
        Index stride, k_stride, size, width, panels = count(size, width);

        Index packed_size(Index k) const { return is_a ? P::a_size(k) : P::b_size(k); }
        const T* at(Index panel, Index k) const { return data + panel * width * stride + k * k_stride; }
        Index rows(Index first, Index last) const { return std::min(last * width, size) - first * width; }
    };

    // Packs panels first, ..., last - 1 into `packed`, one after another, with k values from k0 on.
    void pack(const Operand& x, Index first, Index last, Index k0, Index k, Element* packed) const {
        if (x.unpacked) {
            packed += (last - 1 - first) * x.packed_size(k);
            first = last - 1;
            if (x.rows(first, last) == x.width) return;
        }
        const T* from = x.at(first, k0);
        const Index rows = x.rows(first, last);
        // If k is not contiguous, pack a few rows of memory at a time, prefetching the next ones in memory order.
        const Index stretch = x.k_stride == 1 || x.stride != 1 ? k : PACKED_ROWS;
        for (Index p = 0; p < k; p += stretch) {
            const Index n = std::min(stretch, k - p);
            for (Index next = p + n; next < std::min(k, p + 2 * stretch); next++)
                for (Index i = 0; i < rows; i += 64 / sizeof(T)) __builtin_prefetch(from + next * x.k_stride + i);
            for (Index i = 0; i < rows; i += x.width) {
                const T* corner = from + i * x.stride + p * x.k_stride;
                Element* panel = packed + i / x.width * x.packed_size(k) + x.packed_size(p);
                if (x.is_a) pack_a(corner, x.stride, x.k_stride, std::min(x.width, rows - i), n, panel);
                else pack_b(corner, x.k_stride, x.stride, std::min(x.width, rows - i), n, panel);
            }
            if (x.is_a && m.row_sums) add_row_sums(from + p * x.k_stride, rows, n, m.row_sums + first * x.width);
        }
    }

    void add_row_sums(const T* from, Index rows, Index k, float* sums) const {
        constexpr Index WIDTH = 32;
        const Index row_stride = m.a.row_stride, col_stride = m.a.col_stride;
        for (Index i = 0; i < rows; i += WIDTH) {
            const Index width = std::min(WIDTH, rows - i);
            const T* x = from + i * row_stride;
            float sum[WIDTH] = {};
            if (row_stride == 1 && width == WIDTH)
                for (Index p = 0; p < k; p++)
                    for (Index j = 0; j < WIDTH; j++) sum[j] += to_float(x[p * col_stride + j]);
            else
                for (Index j = 0; j < width; j++)
                    for (Index p = 0; p < k; p++) sum[j] += to_float(x[p * col_stride + j * row_stride]);
            for (Index j = 0; j < width; j++) sums[i + j] += sum[j];
        }
    }

    // Multiplies with a panel of A that is not packed. If `first_time`, also prefetches the next panel.
    void multiply_unpacked(Index row, Index k0, const Element* b_panel, Index k, float* sum, Index ldc, bool first_time) const {
        const T* rows = a + row * m.a.row_stride + k0;
        if (first_time)
            for (Index i = MR; i < std::min(2 * MR, m.M - row); i++)
                for (Index p = 0; p < k; p += 64 / sizeof(T)) __builtin_prefetch(rows + i * m.a.row_stride + p, 0, 2);
        if constexpr (P::UNPACKED_A) unpacked_product<T>(rows, m.a.row_stride, b_panel, k, sum, ldc, k0 > 0);
    }

    // Prefetches the memory that `finish` will read and write, while the tile is being computed.
    void prefetch_results(Index row, Index col) const {
        for (Index i = row; i < std::min(row + MR, m.M); i++) {
            const C* c = (C*)m.c.data + i * m.c.row_stride + col;
            for (Index j = 0; j < NR; j += 64 / sizeof(C)) __builtin_prefetch(c + j, 1);
        }
    }

    // Scales a finished tile (MR x NR), adds bias and D, and stores it in C at (row, col).
    template <bool ADD> void finish(const float* tile, Index row, Index col) const {
        const Index rows = std::min(MR, m.M - row), cols = std::min(NR, m.N - col), offset = row * m.c.row_stride + col;
        C* c = (C*)m.c.data + offset;
        for (Index i = 0; i < rows; i++, tile += NR, c += m.c.row_stride) {
            const C* d = ADD ? (const C*)m.d + offset + i * m.c.row_stride : nullptr;
            if (cols == NR) {
                finish_row<ADD>(tile, bias + col, d, c);
                continue;
            }
            C part[NR] = {};
            if (ADD) std::copy_n(d, cols, part);
            finish_row<ADD>(tile, bias + col, part, part);
            std::copy_n(part, cols, c);
        }
    }

    template <bool ADD> void finish_row(const float* __restrict x, const float* __restrict bias_row, const C* d, C* c) const {
        float y[NR];
        for (Index j = 0; j < NR; j++) {
            y[j] = m.alpha * x[j] + bias_row[j];
            if (ADD) y[j] += m.beta * to_float(d[j]);
        }
        round_row<NR>(y, c);
    }

    void run() {
        if (m.d) run<true>();
        else run<false>();
    }

    template <bool ADD> void run() {
        scratch.rewind();
        const Index padded = count(m.N, NR) * NR;
        bias = scratch.take<float>(padded);
        for (Index j = 0; j < padded; j++) bias[j] = m.bias && j < m.N ? to_float(((const T*)m.bias)[j]) : 0.0f;
        if (m.row_sums) std::fill_n(m.row_sums, m.M, 0.0f);
        if (m.M <= FEW_ROWS && m.b.row_stride == 1 && !m.row_sums) multiply_few_rows<ADD>();
        else multiply<ADD>();
    }

    static_assert(FEW_ROWS <= MR);
    // Reads each column of B, which is contiguous, only once; A's rows stay in the cache.
    template <bool ADD> void multiply_few_rows() {
        using Value = std::conditional_t<HAS_PAIR_DOT<T>, T, float>;
        Value* rows = scratch.take<Value>(m.M * m.K);
        for (Index i = 0; i < m.M; i++)
            for (Index p = 0; p < m.K; p++) {
                const T value = a[i * m.a.row_stride + p * m.a.col_stride];
                if constexpr (HAS_PAIR_DOT<T>) rows[i * m.K + p] = value;
                else rows[i * m.K + p] = to_float(value);
            }
        // Long stretches of B, because a core's prefetcher has to find each of them.
        const Index panels = count(m.N, NR), stretch = count(panels, 8 * pool().threads());
        parallel_for(count(panels, stretch), [&](Index task) {
            for (Index col = task * stretch * NR; col < std::min(m.N, (task + 1) * stretch * NR); col += NR) {
                float tile[MR * NR] = {};
                for (Index j = 0; j < std::min(NR, m.N - col); j++) {
                    const T* column = b + (col + j) * m.b.col_stride;
                    if constexpr (HAS_PAIR_DOT<T>)
                        for (Index i = 0; i < m.M; i++) tile[i * NR + j] = pair_dot(rows + i * m.K, column, m.K);
                    else switch (m.M) {
                        case 1: dots<1>(rows, column, tile + j); break;
                        case 2: dots<2>(rows, column, tile + j); break;
                        case 3: dots<3>(rows, column, tile + j); break;
                        case 4: dots<4>(rows, column, tile + j); break;
                    }
                }
                finish<ADD>(tile, 0, col);
            }
        });
    }

    template <Index ROWS> void dots(const float* rows, const T* column, float* out) const {
        const float *r0 = rows, *r1 = r0 + m.K, *r2 = r1 + m.K, *r3 = r2 + m.K;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (Index p = 0; p < m.K; p++) {
            const float value = to_float(column[p]);
            s0 += value * r0[p];
            if (ROWS > 1) s1 += value * r1[p];
            if (ROWS > 2) s2 += value * r2[p];
            if (ROWS > 3) s3 += value * r3[p];
        }
        const float sums[] = {s0, s1, s2, s3};
        for (Index i = 0; i < ROWS; i++) out[i * NR] = sums[i];
    }

    template <bool ADD> void multiply() {
        const bool unpacked = P::UNPACKED_A && m.a.col_stride == 1 && m.K % P::K_STEP == 0 && !m.row_sums;
        const Operand rows_of_a{true, unpacked, a, m.a.row_stride, m.a.col_stride, m.M, MR};
        const Operand columns_of_b{false, false, b, m.b.col_stride, m.b.row_stride, m.N, NR};
        const bool own_a = m.M > m.N;
        const Operand &own = own_a ? rows_of_a : columns_of_b, &shared = own_a ? columns_of_b : rows_of_a;
        const Index chunks = std::max(Index(1), count(m.K, K_BLOCK));
        const Index chunk = std::max(Index(1), count(count(m.K, chunks), PACKED_ROWS)) * PACKED_ROWS;
        const Index tile_bytes = MR * NR * sizeof(float), panel_bytes = own.packed_size(chunk) * sizeof(Element);
        const Index strip = chunks == 1 ? own.panels : std::clamp(STRIP_BYTES / (shared.panels * tile_bytes), Index(1), own.panels);

        // Units get smaller towards the end of a strip, so that all threads finish at about the same time.
        const Index threads = pool().threads(), largest = std::clamp(UNIT_BYTES / panel_bytes, Index(1), own.panels);
        std::vector<Index> starts = {0};
        for (Index begin = 0; begin < own.panels; begin += strip)
            for (Index end = std::min(own.panels, begin + strip), at = begin; at < end; starts.push_back(at))
                at += std::min(largest, count(end - at, 2 * threads));

        const Index together = std::clamp(shared.panels / (2 * threads), Index(1), Index(4));  // panels packed at a time
        const bool in_place = std::is_same_v<C, float> && !ADD && !m.bias && m.alpha == 1;
        Element* shared_panels = scratch.take<Element>(shared.panels * shared.packed_size(chunk));
        float* sums = chunks == 1 ? nullptr : scratch.take<float>(strip * shared.panels * MR * NR);
        for (Index begin = 0; begin < own.panels; begin += strip) {
            const auto unit_at = [&](Index panel) { return std::lower_bound(starts.begin(), starts.end(), panel) - starts.begin(); };
            const Index first_unit = unit_at(begin), end_unit = unit_at(std::min(own.panels, begin + strip));
            for (Index k0 = 0; k0 < std::max(Index(1), m.K); k0 += chunk) {
                const Index k = std::min(chunk, m.K - k0);
                const bool last_chunk = k0 + k == m.K;
                parallel_for(count(shared.panels, together), [&](Index i) {
                    const Index first = i * together;
                    pack(shared, first, std::min(shared.panels, first + together), k0, k, shared_panels + first * shared.packed_size(k));
                });
                parallel_for(end_unit - first_unit, [&](Index unit) {
                    const Index first = starts[first_unit + unit], panels = starts[first_unit + unit + 1] - first;
                    prepare_products();
                    own_scratch.rewind();
                    Element* own_panels = own_scratch.take<Element>(largest * own.packed_size(chunk));
                    alignas(64) float tile[MR * NR];
                    pack(own, first, first + panels, k0, k, own_panels);
                    for (Index s = 0; s < shared.panels; s++)
                        for (Index o = 0; o < panels; o++) {
                            const Element* own_panel = own_panels + o * own.packed_size(k);
                            const Element* shared_panel = shared_panels + s * shared.packed_size(k);
                            float* sum = sums ? sums + ((first + o - begin) * shared.panels + s) * MR * NR : tile;
                            const Index row = (own_a ? first + o : s) * MR, col = (own_a ? s : first + o) * NR;
                            Index ldc = NR;
                            const bool direct = in_place && row + MR <= m.M && col + NR <= m.N;
                            if (direct) sum = (float*)m.c.data + row * m.c.row_stride + col, ldc = m.c.row_stride;
                            if (last_chunk) prefetch_results(row, col);
                            const Element *a_panel = own_a ? own_panel : shared_panel, *b_panel = own_a ? shared_panel : own_panel;
                            if (unpacked && row + MR <= m.M) multiply_unpacked(row, k0, b_panel, k, sum, ldc, own_a ? s == 0 : o == 0);
                            else block_product<T>(a_panel, b_panel, k, sum, ldc, k0 > 0, m.M - row);
                            if (last_chunk && !direct) finish<ADD>(sum, row, col);
                        }
                });
            }
        }
    }
};

}  // namespace

EXPORT void megatoken_matmul(const Matmul* m) {
    if (m->M <= 0 || m->N <= 0) return;
    with_type(m->dtype, [&](auto t) {
        with_type(m->out_dtype, [&](auto c) { Product<decltype(t), decltype(c)>{*m}.run(); });
    });
}

// Returns whether the process may use AMX tiles; false if the kernels use none.
EXPORT bool megatoken_request_tiles() { return request_tiles(); }
