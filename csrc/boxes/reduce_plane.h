#pragma once

#include <cstdint>
#include <vector>

#include "boxes/batches.h"
#include "boxes/loop_nest.h"
#include "boxes/reduce_kernels.h"

namespace tritondt {

// Reduces planes, the two innermost loops of a nest, batch by batch. An operand whose elements do
// not lie one after the other in a batch goes through a buffer, so that the kernel sees arrays
// only.
class PlaneReducer {
 public:
  PlaneReducer(const LoopNest& nest, const ReduceKernel& kernel, std::int64_t divisor,
               bool is_transposed);

  // The plane whose operands begin at `addresses`: the target, then the slots.
  void run(const std::vector<char*>& addresses);

 private:
  bool is_one_pass() const;
  void run_batch(const Batch& batch, const std::vector<char*>& addresses, std::int64_t row,
                 std::int64_t column);

  const ReduceKernel& kernel_;
  const std::int64_t divisor_;
  std::vector<Strides> strides_;  // per operand
  std::int64_t num_rows_;
  std::int64_t num_columns_;
  Batch largest_;
  alignas(64) char accumulators_[kAccumulatorBytes];
  alignas(64) char gathered_[kMaxGroupSlots][kBatchBytes];
  alignas(64) char scattered_[kBatchBytes];
};

}  // namespace tritondt
