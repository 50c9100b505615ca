// Shared by all kernels: element types, exp and tanh.
//
// The kernels are plain C++ that the compiler vectorizes for each instruction set; only products*.h and scores.h use
// intrinsics. No result depends on the number of threads: blocks have fixed sizes, and partial sums are added in order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

using Index = int64_t;

struct bf16 {
    uint16_t bits;
};

enum DType : int32_t { FP32 = 0, BF16 = 1 };

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

template <class T> T round_to(float x);
template <> inline float round_to<float>(float x) { return x; }
// Rounds to nearest, ties to even, as torch does. A NaN stays NaN.
template <> inline bf16 round_to<bf16>(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x == x ? rounded : 0x7fc0)};
}

// Calls body(T{}) with the C++ type of `dtype`.
template <class Body> void with_type(DType dtype, Body body) {
    if (dtype == BF16) body(bf16{});
    else body(float{});
}

// e^x with a relative error below 2e-7; 0 for x below -87. Computed as 2^n times the Taylor polynomial of e^f, where
// f = x - n ln 2 and |f| <= ln(2) / 2. For precision, ln 2 is subtracted in two parts.
inline float exp_approx(float x) {
    const float n = __builtin_rintf(std::min(std::max(x * 1.44269504f, -126.0f), 127.0f));
    const float f = (std::min(x, 88.0f) - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const float scale = __builtin_bit_cast(float, uint32_t(int32_t(n) + 127) << 23);
    return x < -87.0f ? 0.0f : p * scale;
}

inline float tanh_approx(float x) { return 1.0f - 2.0f / (1.0f + exp_approx(2.0f * std::min(x, 40.0f))); }

// e^-x, bounded so that 1 + e^-x and its square are finite.
inline float exp_minus(float x) { return exp_approx(std::min(-x, 43.0f)); }
