// Every kernel, on up to three threads, at odd sizes and on memory of just their size, for the sanitizers; results must be finite.
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>

#include "kernels.h"
#include "products.h"
#include "scores.h"
#include "scratch.h"
#include "threads.h"

namespace matmul_kernels {
#include "matmul.cc"
}
namespace attention_kernels {
#include "attention.cc"
}
namespace norm_kernels {
#include "norm.cc"
}
namespace int8_kernels {
#include "int8.cc"
}
namespace activation_kernels {
#include "activation.cc"
}
namespace cross_entropy_kernels {
#include "cross_entropy.cc"
}
namespace adamw_kernels {
#include "adamw.cc"
}
namespace muon_kernels {
#include "muon.cc"
}
namespace block_kernels {
#include "block.cc"
}

namespace {

thread_local std::mt19937 random_bits(1);
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
template <class T> View heads_of(std::vector<T>& values, Index rows, Index heads, Index D) {
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
    megatoken_attention_forward(dtype, &vq, &vk, &vv, &vy, lse.data(), B, H, K, rows, rows, D, true);
    megatoken_attention_backward(dtype, &vq, &vk, &vv, &vy, &vdy, lse.data(), &vdq, &vdk, &vdv, B, H, K, rows, D);
    bool right = finite(y) && finite(dq) && finite(dk) && finite(dv);
    // Decoding: one query or some, which see all keys.
    const Index queries = below(2) ? 1 : 1 + below(9);
    auto q1 = draw<T>(B * queries * H * D), k1 = draw<T>(B * keys * K * D), v1 = draw<T>(k1.size());
    std::vector<T> y1(q1.size());
    std::vector<float> lse1(B * H * queries);
    const auto vq1 = heads_of(q1, queries, H, D), vk1 = heads_of(k1, keys, K, D), vv1 = heads_of(v1, keys, K, D), vy1 = heads_of(y1, queries, H, D);
    megatoken_attention_forward(dtype, &vq1, &vk1, &vv1, &vy1, lse1.data(), B, H, K, queries, keys, D, false);
    return right && finite(y1);
}

template <class T> bool check_rows(DType dtype) {
    const Index sizes[] = {1, 2, 15, 17, 33, 64, 100, 515}, N = sizes[below(7)], C = sizes[below(8)];
    const bool rms = below(2), residual = below(2);
    auto x = draw<T>(N * C), weight = draw<T>(C), bias = draw<T>(C), dy = draw<T>(N * C);
    std::vector<T> y(N * C), dx(N * C), dup(N * C), stored(residual * N * C);
    std::vector<float> mean(N), scale(N), dweight(C), dbias(C), loss(N);
    megatoken_norm_forward(dtype, x.data(), residual ? dy.data() : nullptr, stored.data(), weight.data(), rms ? nullptr : bias.data(), y.data(), mean.data(), scale.data(), N, C, 1e-5f, rms);
    megatoken_norm_backward(dtype, dy.data(), residual ? x.data() : nullptr, x.data(), mean.data(), scale.data(), weight.data(), dx.data(), dweight.data(),
                                          rms ? nullptr : dbias.data(), N, C, rms);
    bool right = finite(y) && finite(dx) && finite(dweight) && finite(dbias);
    megatoken_gelu_forward(dtype, x.data(), y.data(), N * C);
    megatoken_gelu_backward(dtype, dy.data(), x.data(), dx.data(), N * C);
    right = right && finite(y) && finite(dx);
    megatoken_swiglu_forward(dtype, x.data(), dy.data(), y.data(), N * C);
    megatoken_swiglu_backward(dtype, y.data(), x.data(), dy.data(), dx.data(), dup.data(), N * C);
    right = right && finite(y) && finite(dx) && finite(dup);
    const Index vocab_size = 1 + below(C);
    std::vector<int64_t> targets(N);
    for (int64_t& target : targets) target = below(4) ? below(vocab_size) : -1;
    cross_entropy_kernels::megatoken_cross_entropy(dtype, x.data(), targets.data(), loss.data(), N, C, vocab_size, below(2) ? 4.0f : 0.0f, below(2));
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
    const adamw_kernels::AdamW update{param.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data(), below(2) ? copy.data() : nullptr, n, dtype,
                                      1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 2.0f};
    adamw_kernels::megatoken_adamw(&update, 1);
    const adamw_kernels::Values values{gradient.data(), n, dtype};
    return finite(param) && std::isfinite(adamw_kernels::megatoken_sum_of_squares(&values, 1));
}

// Small matrices, a large one, and one without a gradient.
template <class T> bool check_muon(DType dtype) {
    const Index sizes[][2] = {{1 + below(40), 1 + below(40)}, {33, 70}, {5, 53001}, {70, 33}};
    std::vector<muon_kernels::Muon> updates;
    std::vector<std::vector<float>> params, momenta;
    std::vector<std::vector<T>> gradients;
    std::vector<std::vector<bf16>> copies;
    for (const auto& [R, C] : sizes) {
        params.push_back(draw<float>(R * C)), momenta.push_back(draw<float>(R * C)), gradients.push_back(draw<T>(R * C));
        copies.emplace_back(R * C);
        updates.push_back({params.back().data(), momenta.back().data(), R == 70 ? nullptr : gradients.back().data(),
                           R == 33 ? nullptr : copies.back().data(), R, C, dtype, below(2) ? BF16 : FP32, 0.1f, 0.1f, 0.9f, 2.0f, R > 33});
    }
    muon_kernels::megatoken_muon(updates.data(), updates.size());
    return std::all_of(params.begin(), params.end(), finite<float>);
}

template <class T> bool check_block(DType dtype) {
    const Index widths[] = {2, 16, 34, 64}, lengths[] = {1, 2, 33, 70};
    const Index B = 1 + below(2), T_ = lengths[below(4)], K = 1 + below(2), H = K * (1 + below(2)), D = widths[below(4)], F = 1 + below(100);
    const bool gated = below(2), biased = below(2), rotary = below(2);
    const Index C = H * D, N = B * T_, qkv = (H + 2 * K) * D, outputs[] = {C, qkv, C, C, F, F, C}, inputs[] = {1, C, C, 1, C, C, F};
    std::vector<std::vector<T>> parameters, gradients;
    block_kernels::Block block{dtype, !biased, 1e-5f, B, T_, C, H, K, D, F, {}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}};
    for (int i = 0; i < block_kernels::PARAMETERS; i++) {
        const bool missing = (i % 2 && !biased) || (i / 2 == block_kernels::GATE / 2 && !gated);
        parameters.push_back(draw<T>(missing ? 0 : outputs[i / 2] * (i % 2 ? 1 : inputs[i / 2])));
        gradients.emplace_back(parameters.back().size());
        block.parameters[i] = missing ? nullptr : parameters.back().data();
        block.gradients[i] = missing ? nullptr : gradients.back().data();
    }
    const auto cos = draw<float>(T_ * D), sin = draw<float>(T_ * D);
    const auto x = draw<T>(N * C), dy = draw<T>(N * C);
    std::vector<T> y(N * C), dx(N * C), saved(N * (4 * C + qkv + (gated ? 3 : 2) * F));
    std::vector<float> stats(N * (4 + H));
    if (rotary) block.cos = cos.data(), block.sin = sin.data();
    block.x = x.data(), block.y = y.data(), block.saved = saved.data(), block.stats = stats.data(), block.dy = dy.data(), block.dx = dx.data();
    block_kernels::megatoken_block_forward(&block);
    block_kernels::megatoken_block_backward(&block);
    return finite(y) && finite(dx) && std::all_of(gradients.begin(), gradients.end(), finite<T>);
}

template <class T> bool check(DType dtype) {
    return check_attention<T>(dtype) && check_rows<T>(dtype) && check_int8<T>(dtype) && check_adamw<T>(dtype) && check_muon<T>(dtype) &&
           check_block<T>(dtype);
}

}  // namespace

int main() {
    bool right[2];
    // Two threads of the program, each with the same values.
    const auto run = [&](int index) {
        right[index] = true;
        for (int n = 0; n < 6; n++) {
            pool().set_threads(1 + n % 3);
            right[index] = right[index] && (n % 2 ? check<bf16>(BF16) : check<float>(FP32));
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    if (right[0] && right[1]) std::printf("6 rounds\n");
}
