#pragma once

#include <cstdint>
#include <cstring>

// Floating-point numbers of 8 and 16 bits as bits, for compilers without the types. Rounding is to
// nearest, ties to even. A NaN becomes quiet and keeps its sign and as much of its payload as fits,
// as the machine's own conversions have it; in bfloat16 it becomes 0x7fc0, and of 8 bits only the
// sign is kept. All is arithmetic and selection, without a branch, so that loops over it vectorise.
namespace tritondt {

[[gnu::always_inline]] inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

[[gnu::always_inline]] inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// By masks: of a conditional expression the compiler makes a branch around the floating-point side,
// and a sum of two slots of float16 then runs at 0.8 GB/s in place of 4 (Zen 3).
[[gnu::always_inline]] inline std::uint32_t select(bool condition, std::uint32_t yes,
                                                   std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

constexpr std::uint32_t kInfinityBits = 0x7f800000;
constexpr std::uint32_t kQuietBit = 1u << 22;

[[gnu::always_inline]] inline float bfloat16_to_float(std::uint16_t half) {
  return float_of(std::uint32_t{half} << 16);
}

[[gnu::always_inline]] inline std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > kInfinityBits;
  return static_cast<std::uint16_t>(is_nan ? 0x7fc0 : rounded);
}

// A sign, an exponent, a mantissa, in this order, and subnormals. The largest exponent means
// infinity and NaN, as in IEEE 754; or, where kIsFiniteNumber, only all ones mean anything but a
// number, which is NaN, and what is too large, an infinity too, becomes the largest number.
template <int kExponentBits, int kMantissaBits, bool kIsFiniteNumber>
struct SmallFloat {
  static constexpr int kSignBit = kExponentBits + kMantissaBits;
  static constexpr int kDroppedBits = 23 - kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr std::uint32_t kBiasBits = (127u - kBias) << 23;
  static constexpr std::int32_t kAllOnes = (1 << kSignBit) - 1;
  static constexpr std::int32_t kIeeeInfinity = ((1 << kExponentBits) - 1) << kMantissaBits;
  // The least magnitude that is no number, the largest that is no NaN, and what is too large.
  static constexpr std::int32_t kNoNumber = kIsFiniteNumber ? kAllOnes : kIeeeInfinity;
  static constexpr std::int32_t kLargest = kIsFiniteNumber ? kAllOnes - 1 : kIeeeInfinity;
  static constexpr std::uint32_t kTooLarge = kLargest;

  [[gnu::always_inline]] static float to_float(std::uint32_t bits) {
    constexpr float kSubnormalUnit = 1.0f / (std::int64_t{1} << (kBias - 1 + kMantissaBits));
    const std::int32_t magnitude = static_cast<std::int32_t>(bits) & kAllOnes;
    const std::uint32_t shifted = static_cast<std::uint32_t>(magnitude) << kDroppedBits;
    const std::uint32_t normal = shifted + kBiasBits;
    const std::uint32_t subnormal = bits_of(static_cast<float>(magnitude) * kSubnormalUnit);
    const std::uint32_t finite = select(magnitude < (1 << kMantissaBits), subnormal, normal);
    const std::uint32_t quiet = select(magnitude > kLargest, kQuietBit, 0);
    const std::uint32_t without_sign =
        select(magnitude < kNoNumber, finite, shifted | kInfinityBits | quiet);
    return float_of(without_sign | (bits >> kSignBit & 1) << 31);
  }

  [[gnu::always_inline]] static std::uint32_t from_float(float x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    // Compared as signed numbers, for which AVX2 has the instruction.
    const std::int32_t order = static_cast<std::int32_t>(magnitude);
    const std::uint32_t odd = (magnitude >> kDroppedBits) & 1;
    const std::uint32_t rounded =
        (magnitude + ((1u << (kDroppedBits - 1)) - 1) + odd - kBiasBits) >> kDroppedBits;
    const std::uint32_t normal = rounded < kTooLarge ? rounded : kTooLarge;
    // Below the normal numbers: floats from kMagic to twice that lie as far apart as the
    // subnormals; adding it rounds to them.
    constexpr std::uint32_t kMagicBits = (127u + 1 - kBias - kMantissaBits + 23) << 23;
    constexpr std::int32_t kNormalOrder = (128 - kBias) << 23;
    const std::uint32_t subnormal =
        bits_of(float_of(magnitude) + float_of(kMagicBits)) - kMagicBits;
    const std::uint32_t finite = select(order < kNormalOrder, subnormal, normal);
    const bool is_nan = order > static_cast<std::int32_t>(kInfinityBits);
    return select(is_nan, nan(magnitude), finite) | (bits >> 31) << kSignBit;
  }

 private:
  [[gnu::always_inline]] static std::uint32_t nan(std::uint32_t magnitude) {
    return kSignBit == 7 ? kAllOnes : ((magnitude | kQuietBit) >> kDroppedBits & kAllOnes);
  }
};

using Float16Bits = SmallFloat<5, 10, false>;
using Float8E5M2Bits = SmallFloat<5, 2, false>;
using Float8E4M3Bits = SmallFloat<4, 3, true>;

}  // namespace tritondt
