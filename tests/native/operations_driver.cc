// Every kernel but products, at odd sizes and on memory of just their size, for the sanitizers; results must be finite.
#include <omp.h>

#include <cstdio>
#include <limits>
#include <numeric>
#include <random>

#include "scores.h"
#include "scratch.h"

namespace attention_kernels {
#include "attention.cc"
}
namespace norm_kernels {
#include "norm.cc"
}
namespace int8_kernels {
#include "int8.cc"
}
namespace other_kernels {
#include "activation.cc"
#include "cross_entropy.cc"
}
#include "adamw.cc"

namespace {

std::mt19937 random_bits(1);
Index below(Index n) { return random_bits() % n; }

template <class T> std::vector<T> draw(Index n) {
    std::vector<T> values(n);
    for (T& x : values) x = round_to<T>(float(below(33)) / 8 - 2);
    return values;
}

template <class T> bool finite(const std::vector<T>& values) {
    return std::all_of(values.begin(), values.end(), [](T x) { return std::isfinite(to_float(x)); });
}

// (B, T, heads, D) as a view (B, heads, T, D).
template <class T> attention_kernels::View heads_of(std::vector<T>& values, Index rows, Index heads, Index D) {
    return {values.data(), rows * heads * D, D, heads * D};
}

template <class T> bool check_attention(DType dtype) {
    const Index widths[] = {2, 16, 33, 34, 64, 80, 128}, B = 1 + below(2), K = 1 + below(2), H = K * (1 + below(3));
    const Index D = widths[below(7)], rows = 1 + below(below(4) ? 80 : 300), keys = 1 + below(100);
    auto q = draw<T>(B * rows * H * D), k = draw<T>(B * rows * K * D), v = draw<T>(k.size()), dy = draw<T>(q.size());
    std::vector<T> y(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
    std::vector<float> lse(B * H * rows);
    const auto vq = heads_of(q, rows, H, D), vk = heads_of(k, rows, K, D), vv = heads_of(v, rows, K, D), vy = heads_of(y, rows, H, D);
    const auto vdy = heads_of(dy, rows, H, D), vdq = heads_of(dq, rows, H, D), vdk = heads_of(dk, rows, K, D), vdv = heads_of(dv, rows, K, D);
    attention_kernels::megatoken_attention_forward(dtype, &vq, &vk, &vv, &vy, lse.data(), B, H, K, rows, rows, D, true);
    attention_kernels::megatoken_attention_backward(dtype, &vq, &vk, &vv, &vy, &vdy, lse.data(), &vdq, &vdk, &vdv, B, H, K, rows, D);
    bool right = finite(y) && finite(dq) && finite(dk) && finite(dv);
    // Decoding: one query or some, which see all keys.
    const Index queries = below(2) ? 1 : 1 + below(9);
    auto q1 = draw<T>(B * queries * H * D), k1 = draw<T>(B * keys * K * D), v1 = draw<T>(k1.size());
    std::vector<T> y1(q1.size());
    std::vector<float> lse1(B * H * queries);
    const auto vq1 = heads_of(q1, queries, H, D), vk1 = heads_of(k1, keys, K, D), vv1 = heads_of(v1, keys, K, D), vy1 = heads_of(y1, queries, H, D);
    attention_kernels::megatoken_attention_forward(dtype, &vq1, &vk1, &vv1, &vy1, lse1.data(), B, H, K, queries, keys, D, false);
    return right && finite(y1);
}

template <class T> bool check_rows(DType dtype) {
    const Index sizes[] = {1, 2, 15, 17, 33, 64, 100, 515}, N = sizes[below(7)], C = sizes[below(8)];
    const bool rms = below(2);
    auto x = draw<T>(N * C), weight = draw<T>(C), bias = draw<T>(C), dy = draw<T>(N * C);
    std::vector<T> y(N * C), dx(N * C), dup(N * C);
    std::vector<float> mean(N), scale(N), dweight(C), dbias(C), loss(N);
    norm_kernels::megatoken_norm_forward(dtype, x.data(), weight.data(), rms ? nullptr : bias.data(), y.data(), mean.data(), scale.data(), N, C, 1e-5f, rms);
    norm_kernels::megatoken_norm_backward(dtype, dy.data(), x.data(), mean.data(), scale.data(), weight.data(), dx.data(), dweight.data(),
                                          rms ? nullptr : dbias.data(), N, C, rms);
    bool right = finite(y) && finite(dx) && finite(dweight) && finite(dbias);
    other_kernels::megatoken_gelu_forward(dtype, x.data(), y.data(), N * C);
    other_kernels::megatoken_gelu_backward(dtype, dy.data(), x.data(), dx.data(), N * C);
    right = right && finite(y) && finite(dx);
    other_kernels::megatoken_swiglu_forward(dtype, x.data(), dy.data(), y.data(), N * C);
    other_kernels::megatoken_swiglu_backward(dtype, y.data(), x.data(), dy.data(), dx.data(), dup.data(), N * C);
    right = right && finite(y) && finite(dx) && finite(dup);
    const Index vocab_size = 1 + below(C);
    std::vector<int64_t> targets(N);
    for (int64_t& target : targets) target = below(4) ? below(vocab_size) : -1;
    other_kernels::megatoken_cross_entropy(dtype, x.data(), targets.data(), loss.data(), N, C, vocab_size, below(2) ? 4.0f : 0.0f, below(2));
    return right && finite(x) && finite(loss);
}

template <class T> bool check_int8(DType dtype) {
    const Index sizes[] = {1, 2, 15, 31, 33, 64, 100, 4500}, M = 1 + below(9), I = sizes[below(8)], O = sizes[below(7)];
    auto x = draw<T>(M * I), bias = draw<T>(O);
    std::vector<int8_t> values(I * O);
    for (int8_t& value : values) value = int8_t(below(255) - 127);
    std::vector<float> scales(O, 0.01f);
    std::vector<T> y(M * O);
    int8_kernels::megatoken_int8_linear(dtype, x.data(), values.data(), scales.data(), below(2) ? bias.data() : nullptr, y.data(), M, I, O);
    return finite(y);
}

template <class T> bool check_adamw(DType dtype) {
    const Index n = 1 + below(3) * 32768 + below(100);
    auto gradient = draw<T>(n);
    auto param = draw<float>(n);
    std::vector<float> exp_avg(n), exp_avg_sq(n);
    std::vector<bf16> copy(n);
    const AdamW update{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 2.0f};
    megatoken_adamw(param.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data(), dtype, below(2) ? copy.data() : nullptr, n, &update);
    return finite(param) && std::isfinite(megatoken_sum_of_squares(dtype, gradient.data(), n));
}

template <class T> bool check(DType dtype) { return check_attention<T>(dtype) && check_rows<T>(dtype) && check_int8<T>(dtype) && check_adamw<T>(dtype); }

}  // namespace

int main() {
    int n = 0;
    for (; n < 12; n++)
        if (!(n % 2 ? check<bf16>(BF16) : check<float>(FP32))) return 1;
    std::printf("%d rounds\n", n);
}
