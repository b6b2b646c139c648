#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tritondt {

constexpr std::int64_t kCacheLineBytes = 64;

// Writes to memory past the cache, in whole lines, so that a line is not read before it is
// overwritten and pushes nothing else out. What is appended may come in pieces of any length: where
// each begins where the last one ended, lines are put together from several of them.
class LineWriter {
 public:
#if defined(__SSE2__)
  static constexpr bool kGoesPastCache = true;
#else
  static constexpr bool kGoesPastCache = false;
#endif

  // Nothing is certain to lie at `target` before finish().
  void append(char* target, const char* source, std::int64_t num_bytes) {
    if (target != line_ + end_) move_to(target);
    if (end_ + num_bytes < kCacheLineBytes) {
      keep(source, num_bytes);
      return;
    }
    if (end_ > 0) {
      const std::int64_t missing = kCacheLineBytes - end_;
      keep(source, missing);
      source += missing;
      num_bytes -= missing;
      if (begin_ == 0) {
        write_lines(line_, buffer_, kCacheLineBytes);
      } else {
        write_kept();
      }
      line_ += kCacheLineBytes;
      begin_ = 0;
      end_ = 0;
    }
    const std::int64_t whole = num_bytes - num_bytes % kCacheLineBytes;
    write_lines(line_, source, whole);
    line_ += whole;
    keep(source + whole, num_bytes - whole);
  }

  // Writes what is left of a line. The caller's thread may then hand the memory to another one.
  void finish() {
    write_kept();
    line_ = nullptr;
    begin_ = 0;
    end_ = 0;
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }

 private:
  void keep(const char* source, std::int64_t num_bytes) {
    std::memcpy(buffer_ + end_, source, static_cast<std::size_t>(num_bytes));
    end_ += num_bytes;
  }

  void write_kept() {
    if (end_ > begin_) {
      std::memcpy(line_ + begin_, buffer_ + begin_, static_cast<std::size_t>(end_ - begin_));
    }
  }

  void move_to(char* target) {
    write_kept();
    begin_ = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % kCacheLineBytes);
    end_ = begin_;
    line_ = target - begin_;
  }

  // Whole lines, at a multiple of a line.
  static void write_lines(char* target, const char* source, std::int64_t num_bytes) {
#if defined(__SSE2__)
    for (std::int64_t i = 0; i < num_bytes; i += kCacheLineBytes) {
      __m128i words[4];
      std::memcpy(words, source + i, sizeof words);
      for (int k = 0; k < 4; ++k) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i) + k, words[k]);
      }
    }
#else
    std::memcpy(target, source, static_cast<std::size_t>(num_bytes));
#endif
  }

  alignas(kCacheLineBytes) char buffer_[kCacheLineBytes];
  char* line_ = nullptr;    // the line that is being put together, of which the buffer holds
  std::int64_t begin_ = 0;  // bytes from begin_
  std::int64_t end_ = 0;    // to end_
};

// Whether a table that moves so many bytes should write past the cache: they would not stay there.
inline bool goes_past_cache(std::int64_t num_bytes) {
  constexpr std::int64_t kPastCacheBytes = std::int64_t{32} << 20;
  return LineWriter::kGoesPastCache && num_bytes >= kPastCacheBytes;
}

}  // namespace tritondt
