#pragma once

#include <cstdint>
#include <vector>

#include "loop_nest.h"
#include "reduce_kernels.h"

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
  struct Strides {
    std::int64_t row;
    std::int64_t column;
  };

  bool is_one_pass() const;
  void run_batch(const std::vector<char*>& addresses, std::int64_t offset_row,
                 std::int64_t offset_column);
  const char* gather(const char* slot, Strides strides, char* buffer) const;
  Strides array_strides() const { return {batch_columns_ * kernel_.itemsize, kernel_.itemsize}; }
  bool is_array(Strides strides) const;
  void copy_batch(char* target, Strides target_strides, const char* source,
                  Strides source_strides) const;

  const ReduceKernel& kernel_;
  const std::int64_t divisor_;
  std::vector<Strides> strides_;  // per operand
  std::int64_t num_rows_;
  std::int64_t num_columns_;
  std::int64_t max_batch_columns_;
  std::int64_t max_batch_rows_;
  std::int64_t batch_rows_ = 0;  // of the batch that is being reduced
  std::int64_t batch_columns_ = 0;
  alignas(64) char accumulators_[kAccumulatorBytes];
  alignas(64) char gathered_[kMaxGroupSlots][kBatchBytes];
  alignas(64) char scattered_[kBatchBytes];
};

}  // namespace tritondt
