#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

// How whole lines are written past the cache: a type for each width of store. 64 stores are in
// flight at most, and with stores of 16 bytes the processor reads only 1 KiB ahead.
namespace tritondt {

#if defined(__x86_64__) && defined(__GNUC__)
struct Words16 {
  static void write(char* target, const char* source, std::int64_t num_bytes) {
    for (std::int64_t i = 0; i < num_bytes; i += 16) {
      __m128i word;
      std::memcpy(&word, source + i, sizeof word);
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), word);
    }
  }
};

struct Words32 {
  [[gnu::target("avx")]] static void write(char* target, const char* source,
                                           std::int64_t num_bytes) {
    for (std::int64_t i = 0; i < num_bytes; i += 32) {
      __m256i word;
      std::memcpy(&word, source + i, sizeof word);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i), word);
    }
  }
};

using BaselineWords = Words16;
#else
struct CachedWords {
  static void write(char* target, const char* source, std::int64_t num_bytes) {
    std::memcpy(target, source, static_cast<std::size_t>(num_bytes));
  }
};

using BaselineWords = CachedWords;
#endif

}  // namespace tritondt
