#include "boxes/cast_kernels.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "boxes/line_writer.h"
#include "cpu/instructions.h"
#include "cpu/number_types.h"
#include "cpu/past_cache.h"

namespace tritondt {
namespace {

template <typename Type>
[[gnu::always_inline]] inline void load_block(const typename Type::Storage* from, float* to) {
  if constexpr (Type::kHasBlocks) {
    Type::load_block(from, to);
  } else {
    for (std::int64_t i = 0; i < kBlockElements; ++i) to[i] = Type::load(from[i]);
  }
}

template <typename Type>
[[gnu::always_inline]] inline void store_block(const float* from, typename Type::Storage* to) {
  if constexpr (Type::kHasBlocks) {
    Type::store_block(from, to);
  } else {
    for (std::int64_t i = 0; i < kBlockElements; ++i) to[i] = Type::store(from[i]);
  }
}

// An element without a factor keeps its bits. Of a NaN the factor changes nothing; a NaN that the
// product makes is the one that is positive and without payload, whatever the machine's is.
template <bool kIsScaled>
[[gnu::always_inline]] inline float scaled(float value, float factor) {
  if constexpr (!kIsScaled) return value;
  const float product = value * factor;
  const std::uint32_t defined =
      select(product == product, bits_of(product), kInfinityBits | kQuietBit);
  return float_of(select(value == value, defined, bits_of(value)));
}

template <typename From, typename To, bool kIsScaled>
[[gnu::always_inline]] inline void run_block(const typename From::Storage* source,
                                             typename To::Storage* target, float factor) {
  if constexpr (From::kHasBlocks || To::kHasBlocks) {
    float values[kBlockElements];
    load_block<From>(source, values);
    for (float& value : values) value = scaled<kIsScaled>(value, factor);
    store_block<To>(values, target);
  } else {
    for (std::int64_t i = 0; i < kBlockElements; ++i) {
      target[i] = To::store(scaled<kIsScaled>(From::load(source[i]), factor));
    }
  }
}

template <typename From, typename To, bool kIsScaled>
[[gnu::always_inline]] inline void run_pass(const CastPass& pass) {
  const auto* const source = reinterpret_cast<const typename From::Storage*>(pass.source);
  auto* const target = reinterpret_cast<typename To::Storage*>(pass.target);
  const std::int64_t num_elements = pass.num_elements;
  const float factor = pass.factor;
  std::int64_t first = 0;
  if constexpr (From::kHasBlocks || To::kHasBlocks) {
    for (; first + kBlockElements <= num_elements; first += kBlockElements) {
      run_block<From, To, kIsScaled>(source + first, target + first, factor);
    }
  }
#pragma GCC ivdep
  for (std::int64_t i = first; i < num_elements; ++i) {
    target[i] = To::store(scaled<kIsScaled>(From::load(source[i]), factor));
  }
}

// Block by block, so that one is read while another is written: float32 to float64 at 24 GB/s; at
// 15 by batches of 4 KiB, between which neither goes on (Zen 4).
template <typename From, typename To, bool kIsScaled, typename Words>
[[gnu::always_inline]] inline std::int64_t run_lines(const CastPass& pass) {
  const auto* const source = reinterpret_cast<const typename From::Storage*>(pass.source);
  alignas(kCacheLineBytes) typename To::Storage block[kBlockElements];
  const std::int64_t num_elements = pass.num_elements - pass.num_elements % kBlockElements;
  for (std::int64_t first = 0; first < num_elements; first += kBlockElements) {
    run_block<From, To, kIsScaled>(source + first, block, pass.factor);
    Words::write(pass.target + first * static_cast<std::int64_t>(sizeof block[0]),
                 reinterpret_cast<const char*>(block), sizeof block);
  }
  return num_elements;
}

template <typename From>
[[gnu::always_inline]] inline std::uint32_t find_largest(const char* source,
                                                         std::int64_t num_elements) {
  const auto* const elements = reinterpret_cast<const typename From::Storage*>(source);
  // As signed numbers, for which AVX2 has a maximum.
  std::int32_t largest = 0;
  const auto take = [&largest](float x) {
    const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(x) & 0x7fffffff);
    const bool is_finite = magnitude < static_cast<std::int32_t>(kInfinityBits);
    largest = std::max(largest, is_finite ? magnitude : 0);
  };
  std::int64_t first = 0;
  if constexpr (From::kHasBlocks) {
    float values[kBlockElements];
    for (; first + kBlockElements <= num_elements; first += kBlockElements) {
      load_block<From>(elements + first, values);
      for (std::int64_t i = 0; i < kBlockElements; ++i) take(values[i]);
    }
  }
  for (std::int64_t i = first; i < num_elements; ++i) take(From::load(elements[i]));
  return static_cast<std::uint32_t>(largest);
}

// Compiled for the machine that the compiler assumes ...
template <typename From, typename To, bool kIsScaled>
void run_baseline(const CastPass& pass) {
  run_pass<From, To, kIsScaled>(pass);
}

template <typename From, typename To, bool kIsScaled>
std::int64_t run_past_cache_baseline(const CastPass& pass) {
  return run_lines<From, To, kIsScaled, BaselineWords>(pass);
}

template <typename From>
std::uint32_t largest_baseline(const char* source, std::int64_t num_elements) {
  return find_largest<From>(source, num_elements);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Type>
using Found = typename WithInstructions<Type>::Found;

// ... and for AVX2 with F16C. The bits of a result are the same.
template <typename From, typename To, bool kIsScaled>
[[gnu::target("avx2,f16c")]] void run_avx2(const CastPass& pass) {
  run_pass<Found<From>, Found<To>, kIsScaled>(pass);
}

template <typename From, typename To, bool kIsScaled>
[[gnu::target("avx2,f16c")]] std::int64_t run_past_cache_avx2(const CastPass& pass) {
  return run_lines<Found<From>, Found<To>, kIsScaled, Words32>(pass);
}

template <typename From>
[[gnu::target("avx2,f16c")]] std::uint32_t largest_avx2(const char* source,
                                                        std::int64_t num_elements) {
  return find_largest<Found<From>>(source, num_elements);
}
#endif

template <typename From, typename To, bool kIsScaled>
CastKernel make_kernel(float target_max) {
  CastKernel kernel = {sizeof(typename From::Storage),
                       sizeof(typename To::Storage),
                       run_baseline<From, To, kIsScaled>,
                       run_past_cache_baseline<From, To, kIsScaled>,
                       largest_baseline<From>,
                       target_max};
#if defined(__x86_64__) && defined(__GNUC__)
  if (instructions() >= Instructions::kAvx2) {
    kernel.run = run_avx2<From, To, kIsScaled>;
    kernel.run_past_cache = run_past_cache_avx2<From, To, kIsScaled>;
    kernel.largest = largest_avx2<From>;
  }
#endif
  return kernel;
}

struct Entry {
  CastVerb verb;
  std::string source_dtype;
  std::string target_dtype;
  CastKernel kernel;
};

template <typename From, typename To>
void add_cast(std::vector<Entry>* entries, const char* source_dtype, const char* target_dtype) {
  entries->push_back(
      {CastVerb::kCast, source_dtype, target_dtype, make_kernel<From, To, false>(0)});
}

template <typename Wide, typename Narrow>
void add_scaled(std::vector<Entry>* entries, const char* wide_dtype, const char* narrow_dtype,
                float narrow_max) {
  entries->push_back(
      {CastVerb::kQuantize, wide_dtype, narrow_dtype, make_kernel<Wide, Narrow, true>(narrow_max)});
  entries->push_back(
      {CastVerb::kDequantize, narrow_dtype, wide_dtype, make_kernel<Narrow, Wide, true>(0)});
}

template <typename From>
void add_from(std::vector<Entry>* entries, const char* source_dtype) {
  add_cast<From, Real<float>>(entries, source_dtype, "float32");
  add_cast<From, Real<double>>(entries, source_dtype, "float64");
  add_cast<From, BFloat16Storage>(entries, source_dtype, "bfloat16");
  add_cast<From, Float16Storage>(entries, source_dtype, "float16");
}

template <typename Wide>
void add_wire(std::vector<Entry>* entries, const char* wide_dtype) {
  add_scaled<Wide, Float8E4M3Storage>(entries, wide_dtype, "float8_e4m3fn", 448.0f);
  add_scaled<Wide, Float8E5M2Storage>(entries, wide_dtype, "float8_e5m2", 57344.0f);
}

std::vector<Entry> make_entries() {
  std::vector<Entry> entries;
  add_from<Real<float>>(&entries, "float32");
  add_from<Real<double>>(&entries, "float64");
  add_from<BFloat16Storage>(&entries, "bfloat16");
  add_from<Float16Storage>(&entries, "float16");
  add_wire<Real<float>>(&entries, "float32");
  add_wire<BFloat16Storage>(&entries, "bfloat16");
  add_wire<Float16Storage>(&entries, "float16");
  return entries;
}

[[noreturn]] void refuse(CastVerb verb, const std::string& source_dtype,
                         const std::string& target_dtype) {
  const std::string wide = "float32, bfloat16, float16";
  const std::string narrow = "float8_e4m3fn, float8_e5m2";
  std::string name = "cast";
  std::string allowed = "two different ones of float32, float64, bfloat16, float16";
  if (verb == CastVerb::kQuantize) {
    name = "quantize";
    allowed = wide + " to " + narrow;
  } else if (verb == CastVerb::kDequantize) {
    name = "dequantize";
    allowed = narrow + " to " + wide;
  }
  throw std::invalid_argument(name + " from " + source_dtype + " to " + target_dtype +
                              "; allowed are " + allowed);
}

}  // namespace

CastKernel find_cast_kernel(CastVerb verb, const std::string& source_dtype,
                            const std::string& target_dtype) {
  static const std::vector<Entry> entries = make_entries();
  if (source_dtype != target_dtype) {
    for (const Entry& entry : entries) {
      if (entry.verb == verb && entry.source_dtype == source_dtype &&
          entry.target_dtype == target_dtype) {
        return entry.kernel;
      }
    }
  }
  refuse(verb, source_dtype, target_dtype);
}

}  // namespace tritondt
