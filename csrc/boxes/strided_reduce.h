#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "boxes/loop_nest.h"
#include "boxes/reduce_kernels.h"
#include "cpu/parallel.h"

namespace tritondt {

// As tritondt.kernels.boxes.Slot and ReduceBox: offsets and strides in elements.
struct Slot {
  std::int64_t source;
  std::int64_t offset;
  std::vector<std::int64_t> strides;
};

struct ReduceBox {
  std::int64_t target;
  std::int64_t target_offset;
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> target_strides;
  std::vector<Slot> slots;
};

// A box as it is run.
struct ReducePiece {
  LoopNest nest;  // operands: target, then the slots in order; at least two loops
  bool is_transposed;
  Slices slices;  // along the longest loop; counts the bytes that are read
};

// A list of boxes to reduce, prepared once and run many times, each time on other tensors.
class ReduceTable {
 public:
  // Throws std::invalid_argument for a box, dtype, op or divisor that cannot be; drops empty boxes.
  ReduceTable(const std::vector<ReduceBox>& boxes, const std::string& op, const std::string& dtype,
              std::int64_t divisor);

  // Reduces every box. A slot may lie exactly where its target lies, and must not overlap one
  // otherwise. Throws std::invalid_argument for a list that is too short, and for a pointer that is
  // used and null or not aligned to the dtype.
  void run(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& targets,
           int num_threads) const;

  // Bytes read, all slots together.
  std::int64_t num_bytes() const { return num_bytes_; }
  std::size_t num_boxes() const { return pieces_.size(); }
  // Loops around an element, the most of any box; at most 1 when every box is contiguous.
  std::size_t num_dims() const { return num_dims_; }

 private:
  ReduceKernel kernel_;
  std::int64_t divisor_;
  std::vector<ReducePiece> pieces_;
  std::int64_t num_bytes_ = 0;
  std::size_t num_dims_ = 0;
};

}  // namespace tritondt
