#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "boxes/copy_planes.h"
#include "boxes/loop_nest.h"
#include "boxes/sweep.h"

namespace tritondt {

// As tritondt.kernels.boxes.CopyBox: offsets and strides in elements of `itemsize` bytes.
struct CopyBox {
  std::int64_t source;
  std::int64_t target;
  std::int64_t source_offset;
  std::int64_t target_offset;
  std::int64_t itemsize;
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> source_strides;
  std::vector<std::int64_t> target_strides;
};

// The loops are around a run of bytes that is contiguous on both sides.
struct CopyPiece : Piece {
  Plane plane;  // the two innermost loops
  CopyPlane copy_plane;
  bool is_cut_along_run;  // else along the longest loop
};

// A list of boxes to copy, prepared once and run many times, each time on other tensors.
class CopyTable {
 public:
  // Writes past the cache where it is told to, or else from the size of a table on that does not
  // stay there. Throws std::invalid_argument for a box that cannot exist; drops empty boxes.
  explicit CopyTable(const std::vector<CopyBox>& boxes,
                     std::optional<bool> is_past_cache = std::nullopt);

  // Copies every box. `sources` and `targets` are the first bytes of the tensors that the boxes
  // number. A source must not overlap a target. Throws std::invalid_argument when a list is too
  // short or a pointer that is used is null.
  void run(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& targets,
           int num_threads) const;

  std::int64_t num_bytes() const { return num_bytes_; }
  std::size_t num_boxes() const { return pieces_.size(); }
  // Loops around the run of bytes, the most of any box; 0 when every box is one run.
  std::size_t num_dims() const { return num_dims_; }

 private:
  std::vector<CopyPiece> pieces_;
  std::vector<Sweep> sweeps_;
  std::int64_t num_bytes_ = 0;
  std::size_t num_dims_ = 0;
  bool is_past_cache_;
};

}  // namespace tritondt
