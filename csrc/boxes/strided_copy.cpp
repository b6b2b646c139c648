#include "boxes/strided_copy.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tritondt {
namespace {

// A run is cut among threads by whole pages.
constexpr std::int64_t kRunSliceBytes = 4096;

// Shorter runs are copied faster than a writer puts lines together from them.
constexpr std::int64_t kLeastAppendedBytes = 64;

void check_itemsize(std::size_t position, std::int64_t itemsize) {
  for (const std::int64_t allowed : {1, 2, 4, 8, 16}) {
    if (itemsize == allowed) return;
  }
  throw std::invalid_argument("box " + std::to_string(position) + ": itemsize " +
                              std::to_string(itemsize) + "; allowed are 1, 2, 4, 8 and 16");
}

// Takes the innermost loop away where it is contiguous on both sides; returns the bytes of the run.
std::int64_t fold_run(LoopNest* nest, std::int64_t itemsize) {
  if (nest->lengths.empty()) return itemsize;
  for (const Operand& operand : nest->operands) {
    if (operand.strides.back() != itemsize) return itemsize;
  }
  const std::int64_t run_bytes = nest->lengths.back() * itemsize;
  nest->lengths.pop_back();
  for (Operand& operand : nest->operands) operand.strides.pop_back();
  return run_bytes;
}

Plane inner_plane(const LoopNest& nest, std::int64_t run_bytes) {
  const std::size_t rows = nest.lengths.size() - 2;
  const std::vector<std::int64_t>& target = nest.operands[0].strides;
  const std::vector<std::int64_t>& source = nest.operands[1].strides;
  return {nest.lengths[rows], nest.lengths[rows + 1], target[rows], target[rows + 1],
          source[rows],       source[rows + 1],       run_bytes};
}

CopyPiece make_piece(LoopNest nest, std::int64_t run_bytes) {
  CopyPiece piece;
  const bool is_transposed = bring_source_dim_inward(&nest);
  pad_to_plane(&nest);
  piece.plane = inner_plane(nest, run_bytes);
  piece.copy_plane = choose_copy_plane(piece.plane, is_transposed);

  const std::int64_t num_bytes = nest.num_elements() * run_bytes;
  const std::int64_t longest = nest.lengths[longest_dim(nest)];
  const std::int64_t num_run_slices = (run_bytes - 1) / kRunSliceBytes + 1;
  piece.is_cut_along_run = num_run_slices > longest;
  piece.may_advance_with_others = !is_transposed && !piece.is_cut_along_run;
  piece.slices = piece.is_cut_along_run
                     ? Slices{num_bytes, num_run_slices, num_bytes / num_run_slices}
                     : Slices{num_bytes, longest, num_bytes / longest};
  piece.nest = std::move(nest);
  return piece;
}

CopyPiece cut(const CopyPiece& piece, std::int64_t first, std::int64_t end) {
  CopyPiece part = piece;
  if (!piece.is_cut_along_run) {
    part.nest = slice(piece.nest, longest_dim(piece.nest), first, end);
    return part;
  }
  const std::int64_t begin_byte = first * kRunSliceBytes;
  part.plane.run_bytes = std::min(end * kRunSliceBytes, piece.plane.run_bytes) - begin_byte;
  for (Operand& operand : part.nest.operands) operand.offset += begin_byte;
  return part;
}

// The plane is made beforehand: taking it from the nest for every run halved the speed of unpacking
// runs of 2 KiB, for it is work that keeps the processor from reading ahead.
void copy_plane(const CopyPiece& piece, std::int64_t num_rows, std::int64_t num_columns,
                char* target, const char* source, LineWriter* writer) {
  if (writer != nullptr && num_rows * num_columns == 1) {
    const std::int64_t run_bytes = piece.plane.run_bytes;
    // Where pieces take turns, the processor fetches no run of this one while it reads another's.
    // Runs of 1 KiB to the columns of 8 peers: 11 GB/s without; 14 with the next run fetched, 17
    // with the one after it (Zen 4).
    if (piece.plane.source_column_stride == run_bytes) {
      fetch(source + 2 * run_bytes, std::min(run_bytes, kRunSliceBytes));
    }
    writer->append(target, source, run_bytes);
    return;
  }
  Plane plane = piece.plane;
  plane.num_rows = num_rows;
  plane.num_columns = num_columns;
  if (writer != nullptr && plane.run_bytes >= kLeastAppendedBytes) {
    append_runs(plane, target, source, writer);
  } else {
    piece.copy_plane(plane, target, source);
  }
}

}  // namespace

CopyTable::CopyTable(const std::vector<CopyBox>& boxes, std::optional<bool> is_past_cache) {
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const CopyBox& box = boxes[i];
    check_itemsize(i, box.itemsize);
    LoopNest nest = make_loop_nest(i, {box.itemsize, box.itemsize}, "source", box.lengths,
                                   {{box.target, box.target_offset, box.target_strides},
                                    {box.source, box.source_offset, box.source_strides}});
    if (nest.num_elements() == 0) continue;
    nest = coalesce(nest);
    const std::int64_t run_bytes = fold_run(&nest, box.itemsize);
    num_dims_ = std::max(num_dims_, nest.lengths.size());
    pieces_.push_back(make_piece(std::move(nest), run_bytes));
    num_bytes_ += pieces_.back().slices.num_bytes;
  }
  sweeps_ = make_sweeps_of(pieces_);
  is_past_cache_ = is_past_cache.value_or(goes_past_cache(num_bytes_));
}

void CopyTable::run(const std::vector<std::uintptr_t>& sources,
                    const std::vector<std::uintptr_t>& targets, int num_threads) const {
  for (const CopyPiece& piece : pieces_) check_pointers(piece.nest, {1, 1}, sources, targets);
  run_sweeps(pieces_, sweeps_, num_bytes_, is_past_cache_, num_threads, sources, targets, cut,
             [] { return copy_plane; });
}

}  // namespace tritondt
