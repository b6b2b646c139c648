#include "boxes/reduce_plane.h"

#include <algorithm>

namespace tritondt {

PlaneReducer::PlaneReducer(const LoopNest& nest, const ReduceKernel& kernel, std::int64_t divisor,
                           bool is_transposed)
    : kernel_(kernel), divisor_(divisor) {
  const std::size_t columns = nest.lengths.size() - 1;
  const std::size_t rows = columns - 1;
  num_rows_ = nest.lengths[rows];
  num_columns_ = nest.lengths[columns];
  strides_.reserve(nest.operands.size());
  for (const Operand& operand : nest.operands) {
    strides_.push_back({operand.strides[rows], operand.strides[columns]});
  }
  largest_ = is_one_pass() ? Batch{1, num_columns_}
                           : largest_batch(num_columns_, kernel.itemsize, is_transposed);
}

// Arrays on all sides and few enough of them: no buffer is used, and so its size is no limit.
bool PlaneReducer::is_one_pass() const {
  if (num_rows_ != 1 || strides_.size() > 1 + kMaxGroupSlots) return false;
  return std::all_of(strides_.begin(), strides_.end(),
                     [this](const Strides& strides) { return strides.column == kernel_.itemsize; });
}

void PlaneReducer::run(const std::vector<char*>& addresses) {
  for_each_batch(num_rows_, num_columns_, largest_,
                 [&](const Batch& batch, std::int64_t row, std::int64_t column) {
                   run_batch(batch, addresses, row, column);
                 });
}

void PlaneReducer::run_batch(const Batch& batch, const std::vector<char*>& addresses,
                             std::int64_t row, std::int64_t column) {
  const std::int64_t itemsize = kernel_.itemsize;
  const auto address = [&](std::size_t k) {
    return addresses[k] + row * strides_[k].row + column * strides_[k].column;
  };
  const bool target_is_array = batch.is_array(strides_[0], itemsize);
  char* const target = target_is_array ? address(0) : scattered_;
  ReducePass pass = {};
  pass.num_elements = batch.num_elements();
  pass.accumulators = accumulators_;
  pass.divisor = divisor_;
  const std::int64_t num_slots = static_cast<std::int64_t>(addresses.size()) - 1;
  for (std::int64_t first = 0; first < num_slots; first += kMaxGroupSlots) {
    pass.num_slots = std::min(kMaxGroupSlots, num_slots - first);
    for (std::int64_t k = 0; k < pass.num_slots; ++k) {
      const std::size_t operand = static_cast<std::size_t>(1 + first + k);
      pass.slots[k] = batch.as_array(address(operand), strides_[operand], itemsize, gathered_[k]);
    }
    pass.is_first = first == 0;
    pass.target = first + pass.num_slots == num_slots ? target : nullptr;
    kernel_.run(pass);
  }
  if (!target_is_array) {
    batch.copy(itemsize, address(0), strides_[0], scattered_, batch.array_strides(itemsize));
  }
}

}  // namespace tritondt
