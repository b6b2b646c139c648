#pragma once

#include <cstdint>

#include "boxes/line_writer.h"

namespace tritondt {

// Two nested loops around a run of `run_bytes` bytes; strides in bytes.
struct Plane {
  std::int64_t num_rows;
  std::int64_t num_columns;
  std::int64_t target_row_stride;
  std::int64_t target_column_stride;
  std::int64_t source_row_stride;
  std::int64_t source_column_stride;
  std::int64_t run_bytes;
};

using CopyPlane = void (*)(const Plane& plane, char* target, const char* source);

// The fastest way to copy planes with the strides and the run of `plane`, whatever their lengths.
// `is_transposed`: the source is denser along the rows than along the columns.
CopyPlane choose_copy_plane(const Plane& plane, bool is_transposed);

// Fetches what will be read soon: to the second-level cache, for what is fetched to the first in
// such amounts pushes out what is read now, which makes unpacking slower than without (Zen 4).
inline void fetch(const char* from, std::int64_t num_bytes) {
  constexpr int kIsRead = 0, kSecondLevelCache = 2;
  for (std::int64_t i = 0; i < num_bytes; i += kCacheLineBytes) {
    __builtin_prefetch(from + i, kIsRead, kSecondLevelCache);
  }
}

// Run by run through a writer, for runs that are not much shorter than a cache line.
void append_runs(const Plane& plane, char* target, const char* source, LineWriter* writer);

}  // namespace tritondt
