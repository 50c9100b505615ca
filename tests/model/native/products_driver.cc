// Products of odd sizes on memory of just their size, for the sanitizers; compared with plain sums.
#include <cstdio>
#include <random>

#include "matmul.cc"

namespace {

std::mt19937 random_bits(1);
Index below(Index n) { return random_bits() % n; }

// A matrix by rows or by columns that begins `skip` values into memory, which ends with it.
template <class T> struct Values {
    Index rows, cols, skip = below(3);
    bool by_columns = below(2);
    std::vector<T> memory = std::vector<T>(skip + rows * cols);
    Matrix matrix = {memory.data() + skip, by_columns ? 1 : cols, by_columns ? rows : 1};

    Values(Index rows, Index cols) : rows(rows), cols(cols) {
        for (T& x : memory) x = round_to<T>(float(below(17)) / 8 - 1);
    }
    double at(Index i, Index j) const { return to_float(((const T*)matrix.data)[i * matrix.row_stride + j * matrix.col_stride]); }
};

template <class T> bool check(DType dtype, bool adds) {
    const Index sizes[] = {1, 2, 3, 7, 12, 16, 31, 33, 65, 100};
    const Index M = sizes[below(10)], N = sizes[below(10)], K = below(20) ? sizes[below(10)] : 3100;
    const Values<T> a(M, K), b(K, N), bias(1, N);
    std::vector<float> c(M * N, 0.5f), sums(M);
    const bool with_sums = below(2);
    Matmul m{dtype, FP32, M, N, K, a.matrix, b.matrix, {c.data(), N, 1}, bias.matrix.data, adds ? c.data() : nullptr, nullptr, -2, 3};
    if (with_sums) m.row_sums = sums.data();
    megatoken_matmul(&m);
    for (Index i = 0; i < M; i++) {
        double row_sum = 0;
        for (Index k = 0; k < K; k++) row_sum += a.at(i, k);
        if (with_sums && std::abs(sums[i] - row_sum) > 1e-2) return false;
        for (Index j = 0; j < N; j++) {
            double expected = (adds ? 1.5 : 0.0) + to_float(((const T*)bias.matrix.data)[j]);
            for (Index k = 0; k < K; k++) expected -= 2 * a.at(i, k) * b.at(k, j);
            if (std::abs(c[i * N + j] - expected) > 1e-3 * (1 + std::abs(expected))) return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    pool().set_threads(3);
    int n = 0;
    for (; n < 150; n++) {
        const bool adds = below(2);
        if (!(below(2) ? check<bf16>(BF16, adds) : check<float>(FP32, adds))) return 1;
    }
    std::printf("%d products\n", n);
}
