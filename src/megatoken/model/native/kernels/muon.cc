// Muon (Jordan et al. 2024) over many matrices: momentum, a Newton-Schulz iteration, and the update of the weights. It
// has the constants of optim/muon.py.
//
// Shapes: R rows, C columns, S the smaller of both. The iteration is in type T, the sums of its products in fp32.
#include "kernels.h"
#include "scratch.h"
#include "threads.h"

#include <vector>

// One matrix; mirrored in library.py.
struct Muon {
    float *param, *momentum_buffer;
    const void* grad;  // or null, as if it were 0
    bf16* copy;        // a bf16 copy of the parameter to update as well, or null
    Index R, C;
    DType grad_dtype, dtype;
    float lr, weight_decay, momentum;
    float grad_scale;  // the gradient is divided by it
    int32_t cautious, equal_rows;
};

namespace {

constexpr Index BLOCK = 1 << 14, STEPS = 5;  // values that a thread processes at a time; of the iteration
constexpr Index STRIP = 48;                  // rows of a symmetric product that are computed at a time
constexpr Index LARGE = 1 << 18;             // a matrix of more values is divided between threads, others are whole tasks
constexpr float A = 3.4445f, B = -4.7750f, CUBE = 2.0315f, EPS = 1e-7f;  // x -> (A + B x x^T + CUBE (x x^T)^2) x

thread_local Scratch scratch;

// Calls body(begin, end) for blocks of [0, n).
template <class Body> void for_blocks(Index n, const Body& body) {
    parallel_for((n + BLOCK - 1) / BLOCK, [&](Index block) { body(block * BLOCK, std::min(n, (block + 1) * BLOCK)); });
}

// Updates the momentum and writes the Nesterov update to `out`; returns its norm.
template <class G> float update_momentum(const Muon& u, float* out) {
    const Index n = u.R * u.C;
    const float decay = 1.0f - u.momentum, inverse_scale = 1.0f / u.grad_scale;
    const G* grad = (const G*)u.grad;
    if (!grad) {
        G* zeros = scratch.take<G>(n);
        std::fill_n(zeros, n, G{});
        grad = zeros;
    }
    float *momentum = u.momentum_buffer, *squares = scratch.take<float>((n + BLOCK - 1) / BLOCK);
    for_blocks(n, [=](Index begin, Index end) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (Index i = begin; i < end; i++) {
            const float g = to_float(grad[i]) * inverse_scale;
            const float m = momentum[i] + decay * (g - momentum[i]);
            const float step = m - decay * (m - g);
            momentum[i] = m;
            out[i] = step;
            sum += step * step;
        }
        squares[begin / BLOCK] = sum;
    });
    double total = 0;
    for (Index i = 0; i < (n + BLOCK - 1) / BLOCK; i++) total += squares[i];
    return float(std::sqrt(total));
}

// out (M, N) = alpha A B + beta D, where rows of out and D are `stride` apart
template <class T>
void multiply(Matrix a, Matrix b, T* out, Index stride, Index M, Index N, Index K, float alpha = 1, const T* d = nullptr, float beta = 0) {
    const DType dtype = std::is_same_v<T, bf16> ? BF16 : FP32;
    const Matmul m{dtype, dtype, M, N, K, a, b, {out, stride, 1}, nullptr, d, nullptr, alpha, beta};
    megatoken_matmul(&m);
}

// The same for a symmetric result (S, S): a strip of rows is computed from the diagonal on, the rest is copied.
template <class T>
void multiply_symmetric(Matrix a, Matrix b, T* out, Index S, Index K, float alpha = 1, const T* d = nullptr, float beta = 0) {
    for (Index i = 0; i < S; i += STRIP) {
        const Matrix rows{(T*)a.data + i * a.row_stride, a.row_stride, a.col_stride}, columns{(T*)b.data + i * b.col_stride, b.row_stride, b.col_stride};
        const Index corner = i * S + i;
        multiply<T>(rows, columns, out + corner, S, std::min(STRIP, S - i), S - i, K, alpha, d ? d + corner : nullptr, beta);
    }
    for (Index i = STRIP; i < S; i++)
        for (Index j = 0; j < i / STRIP * STRIP; j++) out[i * S + j] = out[j * S + i];
}

// Returns x (R, C), whose singular values are at most 1, with singular values between 0.7 and 1.2, in x or `other`.
template <class T> T* newton_schulz(T* x, T* other, Index R, Index C) {
    const Index S = std::min(R, C);
    T *gram = scratch.take<T>(S * S), *odd = scratch.take<T>(S * S);
    const Matrix gram_rows{gram, S, 1}, odd_rows{odd, S, 1};
    for (Index step = 0; step < STEPS; step++) {
        const Matrix by_rows{x, C, 1}, by_columns{x, 1, C};
        multiply_symmetric<T>(R <= C ? by_rows : by_columns, R <= C ? by_columns : by_rows, gram, S, std::max(R, C));
        multiply_symmetric<T>(gram_rows, gram_rows, odd, S, S, CUBE, gram, B);
        multiply<T>(R <= C ? odd_rows : by_rows, R <= C ? by_rows : odd_rows, other, C, R, C, S, 1, x, A);
        std::swap(x, other);
    }
    return x;
}

// Scales the rows of x (R, C) to their root mean square norm.
template <class T> void equalize_rows(T* x, Index R, Index C) {
    float* norms = scratch.take<float>(R);
    parallel_for(R, [=](Index row) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (Index i = row * C; i < (row + 1) * C; i++) sum += to_float(x[i]) * to_float(x[i]);
        norms[row] = std::sqrt(sum);
    });
    double total = 0;
    for (Index row = 0; row < R; row++) total += double(norms[row]) * norms[row];
    const float target = float(std::sqrt(total / R));
    parallel_for(R, [=](Index row) {
        const float factor = target / std::max(norms[row], EPS);
        for (Index i = row * C; i < (row + 1) * C; i++) x[i] = round_to<T>(to_float(x[i]) * factor);
    });
}

template <class T> void update(const Muon& u) {
    scratch.rewind();
    const Index n = u.R * u.C;
    float* sum = scratch.take<float>(n);
    T *x = scratch.take<T>(n), *other = scratch.take<T>(n);
    const float norm = u.grad_dtype == BF16 ? update_momentum<bf16>(u, sum) : update_momentum<float>(u, sum);
    const float factor = 1.0f / std::max(norm, EPS);
    for_blocks(n, [=](Index begin, Index end) {
        for (Index i = begin; i < end; i++) x[i] = round_to<T>(sum[i] * factor);
    });
    T* result = newton_schulz(x, other, u.R, u.C);
    if (u.equal_rows) equalize_rows(result, u.R, u.C);
    const float step_size = u.lr * std::sqrt(std::max(1.0f, float(u.R) / float(u.C))), decay = u.lr * u.weight_decay;
    const bool cautious = u.cautious;
    float* param = u.param;
    bf16* copy = u.copy;
    for_blocks(n, [=](Index begin, Index end) {
#pragma GCC ivdep
        for (Index i = begin; i < end; i++) {
            const float p = param[i], step = step_size * to_float(result[i]);
            param[i] = p - (cautious && p * step < 0 ? 0.0f : decay * p) - step;
        }
        if (copy)
            for (Index i = begin; i < end; i++) copy[i] = round_to<bf16>(param[i]);
    });
}

}  // namespace

EXPORT void megatoken_muon(const Muon* updates, Index n) {
    const auto update_matrix = [&](const Muon& u) { with_type(u.dtype, [&](auto t) { update<decltype(t)>(u); }); };
    std::vector<const Muon*> small;
    for (const Muon* u = updates; u < updates + n; u++) {
        if (u->R * u->C > LARGE) update_matrix(*u);
        else small.push_back(u);
    }
    parallel_for(small.size(), [&](Index i) { update_matrix(*small[i]); });
}
