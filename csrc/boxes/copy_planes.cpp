#include "boxes/copy_planes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "cpu/instructions.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace tritondt {
namespace {

// A run whose length is known to the compiler becomes a few moves, without a call.
template <std::int64_t kRunBytes>
void copy_fixed_runs(const Plane& plane, char* target, const char* source) {
  for (std::int64_t row = 0; row < plane.num_rows; ++row) {
    char* to = target + row * plane.target_row_stride;
    const char* from = source + row * plane.source_row_stride;
    for (std::int64_t column = 0; column < plane.num_columns; ++column) {
      std::memcpy(to, from, kRunBytes);
      to += plane.target_column_stride;
      from += plane.source_column_stride;
    }
  }
}

void copy_runs(const Plane& plane, char* target, const char* source) {
  for (std::int64_t row = 0; row < plane.num_rows; ++row) {
    char* to = target + row * plane.target_row_stride;
    const char* from = source + row * plane.source_row_stride;
    for (std::int64_t column = 0; column < plane.num_columns; ++column) {
      std::memcpy(to, from, static_cast<std::size_t>(plane.run_bytes));
      to += plane.target_column_stride;
      from += plane.source_column_stride;
    }
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
// Runs of a vector or more, each from its front to its end, the last vector overlapping the one
// before.
template <typename Vector>
[[gnu::always_inline]] inline void copy_runs_by(const Plane& plane, char* target,
                                                const char* source) {
  constexpr std::int64_t kVectorBytes = sizeof(Vector);
  const std::int64_t last = plane.run_bytes - kVectorBytes;
  const auto move = [](char* to, const char* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    std::memcpy(to, &vector, sizeof vector);
  };
  for (std::int64_t row = 0; row < plane.num_rows; ++row) {
    char* to = target + row * plane.target_row_stride;
    const char* from = source + row * plane.source_row_stride;
    for (std::int64_t column = 0; column < plane.num_columns; ++column) {
      for (std::int64_t i = 0; i < last; i += kVectorBytes) move(to + i, from + i);
      move(to + last, from + last);
      to += plane.target_column_stride;
      from += plane.source_column_stride;
    }
  }
}

[[gnu::target("avx")]] void copy_runs_by_32(const Plane& plane, char* target, const char* source) {
  copy_runs_by<__m256i>(plane, target, source);
}

[[gnu::target("avx512f")]] void copy_runs_by_64(const Plane& plane, char* target,
                                                const char* source) {
  copy_runs_by<__m512i>(plane, target, source);
}
#endif

// From this length on, memcpy is as fast. Runs of 1 and 2 KiB in 64 MB: 7 and 4 GB/s by memcpy,
// which begins at the end of a run or by an instruction that starts slowly; 9 by vectors (Zen 4).
constexpr std::int64_t kMemcpyBytes = 4096;

CopyPlane choose_runs(std::int64_t run_bytes) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (run_bytes >= kCacheLineBytes && run_bytes < kMemcpyBytes) {
    if (instructions() == Instructions::kAvx512) return copy_runs_by_64;
    if (instructions() == Instructions::kAvx2) return copy_runs_by_32;
  }
#endif
  return copy_runs;
}

// Copies tile by tile, so that a cache line which one row of a tile loads is still there for the
// next.
template <CopyPlane kCopyTile>
void copy_tiles(const Plane& plane, char* target, const char* source) {
  constexpr std::int64_t kTileRows = 16;
  constexpr std::int64_t kTileColumns = 64;
  Plane tile = plane;
  for (std::int64_t column = 0; column < plane.num_columns; column += kTileColumns) {
    tile.num_columns = std::min(kTileColumns, plane.num_columns - column);
    for (std::int64_t row = 0; row < plane.num_rows; row += kTileRows) {
      tile.num_rows = std::min(kTileRows, plane.num_rows - row);
      kCopyTile(tile, target + row * plane.target_row_stride + column * plane.target_column_stride,
                source + row * plane.source_row_stride + column * plane.source_column_stride);
    }
  }
}

// 16 bytes as kSize-byte words; transposing a square of them takes log2(16 / kSize) interleavings.
template <std::int64_t kSize>
struct Words;
template <>
struct Words<1> {
  typedef std::uint8_t Vector __attribute__((vector_size(16)));
  static Vector low(Vector x, Vector y) {
    return __builtin_shuffle(x, y, Vector{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  }
  static Vector high(Vector x, Vector y) {
    return __builtin_shuffle(x, y,
                             Vector{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  }
};
template <>
struct Words<2> {
  typedef std::uint16_t Vector __attribute__((vector_size(16)));
  static Vector low(Vector x, Vector y) {
    return __builtin_shuffle(x, y, Vector{0, 8, 1, 9, 2, 10, 3, 11});
  }
  static Vector high(Vector x, Vector y) {
    return __builtin_shuffle(x, y, Vector{4, 12, 5, 13, 6, 14, 7, 15});
  }
};
template <>
struct Words<4> {
  typedef std::uint32_t Vector __attribute__((vector_size(16)));
  static Vector low(Vector x, Vector y) { return __builtin_shuffle(x, y, Vector{0, 4, 1, 5}); }
  static Vector high(Vector x, Vector y) { return __builtin_shuffle(x, y, Vector{2, 6, 3, 7}); }
};
template <>
struct Words<8> {
  typedef std::uint64_t Vector __attribute__((vector_size(16)));
  static Vector low(Vector x, Vector y) { return __builtin_shuffle(x, y, Vector{0, 2}); }
  static Vector high(Vector x, Vector y) { return __builtin_shuffle(x, y, Vector{1, 3}); }
};

// Writes the transpose of a square of 16 by 16 bytes, seen as words of kSize bytes.
template <std::int64_t kSize>
inline void transpose_square(char* target, std::int64_t target_stride, const char* source,
                             std::int64_t source_stride) {
  using Vector = typename Words<kSize>::Vector;
  constexpr std::int64_t kSide = 16 / kSize;
  Vector lines[kSide];
  for (std::int64_t i = 0; i < kSide; ++i) {
    std::memcpy(&lines[i], source + i * source_stride, sizeof(Vector));
  }
  // Interleaving line i with line i + side/2 rotates the bits of (line, word) by one place.
  for (std::int64_t step = 1; step < kSide; step *= 2) {
    Vector next[kSide];
    for (std::int64_t i = 0; i < kSide / 2; ++i) {
      next[2 * i] = Words<kSize>::low(lines[i], lines[i + kSide / 2]);
      next[2 * i + 1] = Words<kSize>::high(lines[i], lines[i + kSide / 2]);
    }
    std::copy(next, next + kSide, lines);
  }
  for (std::int64_t i = 0; i < kSide; ++i) {
    std::memcpy(target + i * target_stride, &lines[i], sizeof(Vector));
  }
}

// Rows are contiguous words of the source, columns contiguous words of the target. A tile is one
// cache line of rows by 64 columns: every line is read once and written once, through a buffer on
// the stack, so that strides of a power of two, which put all lines of a tile in one cache set,
// cost nothing.
template <std::int64_t kSize>
void copy_transposed(const Plane& plane, char* target, const char* source) {
  constexpr std::int64_t kTileRows = kCacheLineBytes / kSize;
  constexpr std::int64_t kTileColumns = 64;
  constexpr std::int64_t kSide = 16 / kSize;
  const std::int64_t full_rows = plane.num_rows - plane.num_rows % kTileRows;
  const std::int64_t full_columns = plane.num_columns - plane.num_columns % kTileColumns;
  alignas(kCacheLineBytes) char buffer[kTileRows * kTileColumns * kSize];

  for (std::int64_t column = 0; column < full_columns; column += kTileColumns) {
    for (std::int64_t row = 0; row < full_rows; row += kTileRows) {
      for (std::int64_t i = 0; i < kTileColumns; i += kSide) {
        const char* from = source + row * kSize + (column + i) * plane.source_column_stride;
        for (std::int64_t j = 0; j < kTileRows; j += kSide) {
          transpose_square<kSize>(buffer + (j * kTileColumns + i) * kSize, kTileColumns * kSize,
                                  from + j * kSize, plane.source_column_stride);
        }
      }
      for (std::int64_t j = 0; j < kTileRows; ++j) {
        std::memcpy(target + (row + j) * plane.target_row_stride + column * kSize,
                    buffer + j * kTileColumns * kSize, kTileColumns * kSize);
      }
    }
  }
  Plane right = plane;
  right.num_columns -= full_columns;
  copy_tiles<copy_fixed_runs<kSize>>(right, target + full_columns * kSize,
                                     source + full_columns * plane.source_column_stride);
  Plane bottom = plane;
  bottom.num_rows -= full_rows;
  bottom.num_columns = full_columns;
  copy_tiles<copy_fixed_runs<kSize>>(bottom, target + full_rows * plane.target_row_stride,
                                     source + full_rows * kSize);
}

template <std::int64_t kRunBytes>
CopyPlane choose_fixed(const Plane& plane, bool is_transposed) {
  if (!is_transposed || kRunBytes >= kCacheLineBytes) return copy_fixed_runs<kRunBytes>;
  if constexpr (kRunBytes <= 8) {
    if (plane.source_row_stride == kRunBytes && plane.target_column_stride == kRunBytes) {
      return copy_transposed<kRunBytes>;
    }
  }
  return copy_tiles<copy_fixed_runs<kRunBytes>>;
}

}  // namespace

CopyPlane choose_copy_plane(const Plane& plane, bool is_transposed) {
  switch (plane.run_bytes) {
    case 1:
      return choose_fixed<1>(plane, is_transposed);
    case 2:
      return choose_fixed<2>(plane, is_transposed);
    case 4:
      return choose_fixed<4>(plane, is_transposed);
    case 8:
      return choose_fixed<8>(plane, is_transposed);
    case 16:
      return choose_fixed<16>(plane, is_transposed);
    case 32:
      return choose_fixed<32>(plane, is_transposed);
    case 64:
      return choose_fixed<64>(plane, is_transposed);
    default:
      return is_transposed && plane.run_bytes < kCacheLineBytes ? copy_tiles<copy_runs>
                                                                : choose_runs(plane.run_bytes);
  }
}

void append_runs(const Plane& plane, char* target, const char* source, LineWriter* writer) {
  // Short runs with gaps between them lead the processor to fetch the gaps. Every second one of 512
  // bytes: 6.3 GB/s without, 7.7 fetched so far ahead (Zen 4); from 4 KiB on it makes no
  // difference.
  constexpr std::int64_t kAheadBytes = 16384, kShortBytes = 4096;
  const bool has_gaps = plane.source_column_stride > plane.run_bytes;
  const std::int64_t num_ahead = has_gaps && plane.run_bytes < kShortBytes
                                     ? (kAheadBytes - 1) / plane.run_bytes + 1
                                     : plane.num_columns;
  for (std::int64_t row = 0; row < plane.num_rows; ++row) {
    char* to = target + row * plane.target_row_stride;
    const char* from = source + row * plane.source_row_stride;
    for (std::int64_t column = 0; column < plane.num_columns; ++column) {
      if (column + num_ahead < plane.num_columns) {
        fetch(from + num_ahead * plane.source_column_stride, plane.run_bytes);
      }
      writer->append(to, from, plane.run_bytes);
      to += plane.target_column_stride;
      from += plane.source_column_stride;
    }
  }
}

}  // namespace tritondt
