#pragma once

#include <cstdint>

#include "cpu/small_floats.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

// Floating-point dtypes in memory (Storage) as float32 in registers. Templates that
// boxes/cast_kernels.cpp and boxes/reduce_types.h build on.
namespace tritondt {

// Elements of a block, for dtypes that are converted block by block: long enough for loops over the
// floats between to vectorise, short enough for these to stay in the first-level cache.
constexpr std::int64_t kBlockElements = 64;

// The machine's conversions keep the sign and the payload of a NaN and make it quiet.
template <typename T>
struct Real {
  using Storage = T;
  static constexpr bool kHasBlocks = false;
  [[gnu::always_inline]] static float load(T x) { return static_cast<float>(x); }
  [[gnu::always_inline]] static T store(float x) { return static_cast<T>(x); }
};

struct BFloat16Storage {
  using Storage = std::uint16_t;
  static constexpr bool kHasBlocks = false;
  [[gnu::always_inline]] static float load(Storage x) { return bfloat16_to_float(x); }
  [[gnu::always_inline]] static Storage store(float x) { return float_to_bfloat16(x); }
};

template <typename Bits, typename T>
struct SmallStorage {
  using Storage = T;
  static constexpr bool kHasBlocks = false;
  [[gnu::always_inline]] static float load(T x) { return Bits::to_float(x); }
  [[gnu::always_inline]] static T store(float x) { return static_cast<T>(Bits::from_float(x)); }
};

using Float16Storage = SmallStorage<Float16Bits, std::uint16_t>;
using Float8E5M2Storage = SmallStorage<Float8E5M2Bits, std::uint8_t>;
using Float8E4M3Storage = SmallStorage<Float8E4M3Bits, std::uint8_t>;

#if defined(__x86_64__) && defined(__GNUC__)
// float16 by the instructions for it, with the same bits, where the machine has them. Called, for a
// function is inlined only into such as are compiled for the same instructions.
struct Float16Instructions : Float16Storage {
  static constexpr bool kHasBlocks = true;
  [[gnu::target("avx2,f16c")]] static void load_block(const Storage* from, float* to) {
    for (std::int64_t i = 0; i < kBlockElements; i += 8) {
      __m128i halves;
      std::memcpy(&halves, from + i, sizeof halves);
      const __m256 floats = _mm256_cvtph_ps(halves);
      std::memcpy(to + i, &floats, sizeof floats);
    }
  }
  [[gnu::target("avx2,f16c")]] static void store_block(const float* from, Storage* to) {
    for (std::int64_t i = 0; i < kBlockElements; i += 8) {
      __m256 floats;
      std::memcpy(&floats, from + i, sizeof floats);
      const __m128i halves = _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to + i, &halves, sizeof halves);
    }
  }
};
#endif

// What a function that is compiled for AVX2 and F16C uses in place of a type.
template <typename Type>
struct WithInstructions {
  using Found = Type;
};
#if defined(__x86_64__) && defined(__GNUC__)
template <>
struct WithInstructions<Float16Storage> {
  using Found = Float16Instructions;
};
#endif

}  // namespace tritondt
