#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "boxes/line_writer.h"
#include "boxes/loop_nest.h"
#include "cpu/parallel.h"

namespace tritondt {

using Pointers = std::vector<std::uintptr_t>;

// A box that is moved, as it is run: loops around what a table does with a plane, the two innermost
// ones.
struct Piece {
  LoopNest nest;  // operands: target, source; at least two loops
  bool may_advance_with_others;
  Slices slices;
};

// Pieces that advance together, row by row, for they lie side by side in the rows of one tensor:
// the columns that several peers are sent, or send. Together they walk memory in order; each by
// itself walks it in strides, with a miss of the TLB and a new start of the prefetcher for every
// run. Runs of 1 KiB for 8 peers: 5 GB/s one after the other, 16 together (Zen 4).
struct Sweep {
  std::vector<std::size_t> pieces;  // positions in the table's list; where it is one, any piece
  bool shares_target;               // side by side in the target; else in the source
  std::int64_t row_bytes;
  Slices slices;
};

// Every piece in one sweep.
std::vector<Sweep> make_sweeps(const std::vector<const Piece*>& pieces);

template <typename SomePiece>
std::vector<Sweep> make_sweeps_of(const std::vector<SomePiece>& pieces) {
  std::vector<const Piece*> addresses;
  for (const SomePiece& piece : pieces) addresses.push_back(&piece);
  return make_sweeps(addresses);
}

// How one piece is walked while the tensors are known. A row of a sweep is one step of the
// piece's outermost loop longer than 1.
struct Lane {
  char* target;
  const char* source;
  std::int64_t target_stride;  // of a row
  std::int64_t source_stride;
  std::int64_t num_columns;
  bool is_one_row;  // the plane is, and the sweep's rows are its columns
};

Lane make_lane(const LoopNest& nest, const Pointers& sources, const Pointers& targets);

// Calls run(nest, num_rows, num_columns, target, source, writer) for every plane of a nest.
template <typename Run>
void walk_nest(const LoopNest& nest, std::size_t dim, char* target, const char* source,
               LineWriter* writer, const Run& run) {
  if (dim + 2 == nest.lengths.size()) {
    run(nest.lengths[dim], nest.lengths[dim + 1], target, source, writer);
    return;
  }
  for (std::int64_t i = 0; i < nest.lengths[dim]; ++i) {
    walk_nest(nest, dim + 1, target, source, writer, run);
    target += nest.operands[0].strides[dim];
    source += nest.operands[1].strides[dim];
  }
}

// Rows of this many bytes are walked by one piece before the next one gets its turn.
constexpr std::int64_t kTurnBytes = 8192;

// Calls run(k, num_rows, num_columns, target, source, writer) for planes of piece k of the sweep
// until its rows [first, end) are done.
template <typename Run>
void walk_together(const Sweep& sweep, const std::vector<Lane>& lanes, std::int64_t first,
                   std::int64_t end, std::vector<LineWriter>* writers, const Run& run) {
  // A line that two pieces share is put together only where they write through one writer, one
  // directly after the other.
  const std::int64_t turn =
      writers->empty() ? std::max<std::int64_t>(1, kTurnBytes / sweep.row_bytes) : 1;
  for (std::int64_t row = first; row < end; row += turn) {
    const std::int64_t count = std::min(turn, end - row);
    for (std::size_t k = 0; k < lanes.size(); ++k) {
      const Lane& lane = lanes[k];
      LineWriter* const writer =
          writers->empty() ? nullptr : &(*writers)[sweep.shares_target ? 0 : k];
      run(k, lane.is_one_row ? 1 : count, lane.is_one_row ? count : lane.num_columns,
          lane.target + row * lane.target_stride, lane.source + row * lane.source_stride, writer);
    }
  }
}

// Covers all pieces by planes, with up to `num_threads` threads. cut(piece, first, end) makes a
// piece of some of its slices. make_run() is called for each part of the work; what it returns is
// called as run(piece, num_rows, num_columns, target, source, writer), where `writer` is null
// unless `goes_past_cache`.
template <typename SomePiece, typename Cut, typename MakeRun>
void run_sweeps(const std::vector<SomePiece>& pieces, const std::vector<Sweep>& sweeps,
                std::int64_t num_bytes, bool goes_past_cache, int num_threads,
                const Pointers& sources, const Pointers& targets, const Cut& cut,
                const MakeRun& make_run) {
  const auto run_alone = [&](const SomePiece& piece, LineWriter* writer) {
    auto run = make_run();
    const Lane lane = make_lane(piece.nest, sources, targets);
    walk_nest(piece.nest, 0, lane.target, lane.source, writer,
              [&](auto... plane) { run(piece, plane...); });
  };
  const auto run_part = [&](const Sweep& sweep, std::int64_t first, std::int64_t end) {
    std::vector<LineWriter> writers(goes_past_cache ? sweep.pieces.size() : 0);
    const SomePiece& piece = pieces[sweep.pieces[0]];
    if (sweep.pieces.size() > 1) {
      auto run = make_run();
      std::vector<Lane> lanes;
      for (const std::size_t i : sweep.pieces) {
        lanes.push_back(make_lane(pieces[i].nest, sources, targets));
      }
      walk_together(sweep, lanes, first, end, &writers,
                    [&](std::size_t k, auto... plane) { run(pieces[sweep.pieces[k]], plane...); });
    } else if (first == 0 && end == sweep.slices.num_slices) {
      run_alone(piece, writers.data());
    } else {
      run_alone(cut(piece, first, end), writers.data());
    }
    for (LineWriter& writer : writers) writer.finish();
  };
  run_in_threads(sweeps, num_bytes, num_threads, run_part);
}

}  // namespace tritondt
