#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/team.h"

namespace tritondt {

// Where threads must be started, that and joining them takes 30 us (median, Linux on Zen 3), in
// which one core copies 0.3 MB that lie in memory and 0.9 MB that lie in cache.
constexpr std::int64_t kBytesPerThread = std::int64_t{1} << 20;

// How a piece of work can be cut: `num_slices` slices of `slice_bytes`, the last one maybe shorter.
struct Slices {
  std::int64_t num_bytes;
  std::int64_t num_slices;
  std::int64_t slice_bytes;

  // Number of slices that begin before byte `bytes`.
  std::int64_t before(std::int64_t bytes) const {
    if (bytes <= 0) return 0;
    return std::min(num_slices, (bytes - 1) / slice_bytes + 1);
  }
};

// Calls run(piece, first_slice, end_slice) so that every slice of every piece is run once, by up to
// `num_threads` threads with equal bytes, the caller being one of them. Every piece has `slices`.
template <typename Piece, typename Run>
void run_in_threads(const std::vector<Piece>& pieces, std::int64_t num_bytes, int num_threads,
                    const Run& run) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                "; it must be 1 or more");
  }
  const std::int64_t num_parts =
      std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads, num_bytes / kBytesPerThread));
  if (num_parts == 1) {
    for (const Piece& piece : pieces) run(piece, 0, piece.slices.num_slices);
    return;
  }
  const std::int64_t part_bytes = (num_bytes - 1) / num_parts + 1;
  run_parts(num_parts, [&pieces, &run, part_bytes](std::int64_t part) {
    std::int64_t begin = part * part_bytes;
    for (const Piece& piece : pieces) {
      const std::int64_t first = piece.slices.before(begin);
      const std::int64_t end = piece.slices.before(begin + part_bytes);
      if (first < end) run(piece, first, end);
      begin -= piece.slices.num_bytes;
    }
  });
}

}  // namespace tritondt
