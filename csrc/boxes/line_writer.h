#pragma once

#include <cstdint>

namespace tritondt {

constexpr std::int64_t kCacheLineBytes = 64;

// Writes to memory past the cache, in whole lines, so that a line is not read before it is
// overwritten and pushes nothing else out. What is appended may come in pieces of any length: where
// each begins where the last one ended, lines are put together from several of them.
class LineWriter {
 public:
  LineWriter();

  // Nothing is certain to lie at `target` before finish().
  void append(char* target, const char* source, std::int64_t num_bytes) {
    if (target != line_ + end_) move_to(target);
    add_(this, source, num_bytes);
  }

  // Writes what is left of a line. The caller's thread may then hand the memory to another one.
  void finish();

 private:
  // A line that was put together from several pieces, and where it belongs, unless it was written.
  struct Line {
    alignas(kCacheLineBytes) char bytes[kCacheLineBytes];
    char* target;
  };
  static constexpr std::int64_t kLines = 4;

  using Add = void (*)(LineWriter* writer, const char* source, std::int64_t num_bytes);
  static Add choose_add();
  template <typename Words>
  static void add_by(LineWriter* writer, const char* source, std::int64_t num_bytes);
  static void add_by_masks(LineWriter* writer, const char* source, std::int64_t num_bytes);

  char* bytes() { return lines_[current_].bytes; }
  void move_to(char* target);
  void write_kept();
  // Puts a line off that is full, for which the one that was put off longest is written.
  template <typename Words>
  void put_off();

  Line lines_[kLines];
  std::int64_t current_ = 0;  // the line that is being put together
  char* line_ = nullptr;      // where it belongs; of it are kept
  std::int64_t begin_ = 0;    // bytes from begin_
  std::int64_t end_ = 0;      // to end_
  Add add_;
};

// Copies to memory past the cache.
void copy_past_cache(char* target, const char* source, std::int64_t num_bytes);

// Whether a table that moves so many bytes should write past the cache: they would not stay there.
bool goes_past_cache(std::int64_t num_bytes);

}  // namespace tritondt
