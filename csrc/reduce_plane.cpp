#include "reduce_plane.h"

#include <algorithm>
#include <cstdlib>

#include "copy_planes.h"

namespace tritondt {
namespace {

// With rows of kBatchBytes / 64 columns, a tile of a transposing copy: one cache line by 64
// columns.
constexpr std::int64_t kTransposedColumns = 64;

}  // namespace

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
  const std::int64_t batch_elements = kBatchBytes / kernel.itemsize;
  if (is_one_pass()) {
    max_batch_columns_ = num_columns_;
  } else {
    max_batch_columns_ =
        std::min(is_transposed ? kTransposedColumns : batch_elements, num_columns_);
  }
  max_batch_rows_ = std::max<std::int64_t>(1, batch_elements / max_batch_columns_);
}

// Arrays on all sides and few enough of them: no buffer is used, and so its size is no limit.
bool PlaneReducer::is_one_pass() const {
  if (num_rows_ != 1 || strides_.size() > 1 + kMaxGroupSlots) return false;
  return std::all_of(strides_.begin(), strides_.end(),
                     [this](const Strides& strides) { return strides.column == kernel_.itemsize; });
}

void PlaneReducer::run(const std::vector<char*>& addresses) {
  for (std::int64_t column = 0; column < num_columns_; column += max_batch_columns_) {
    batch_columns_ = std::min(max_batch_columns_, num_columns_ - column);
    for (std::int64_t row = 0; row < num_rows_; row += max_batch_rows_) {
      batch_rows_ = std::min(max_batch_rows_, num_rows_ - row);
      run_batch(addresses, row, column);
    }
  }
}

void PlaneReducer::run_batch(const std::vector<char*>& addresses, std::int64_t row,
                             std::int64_t column) {
  const auto address = [&](std::size_t k) {
    return addresses[k] + row * strides_[k].row + column * strides_[k].column;
  };
  const bool target_is_array = is_array(strides_[0]);
  char* const target = target_is_array ? address(0) : scattered_;
  ReducePass pass = {};
  pass.num_elements = batch_rows_ * batch_columns_;
  pass.accumulators = accumulators_;
  pass.divisor = divisor_;
  const std::int64_t num_slots = static_cast<std::int64_t>(addresses.size()) - 1;
  for (std::int64_t first = 0; first < num_slots; first += kMaxGroupSlots) {
    pass.num_slots = std::min(kMaxGroupSlots, num_slots - first);
    for (std::int64_t k = 0; k < pass.num_slots; ++k) {
      const std::size_t operand = static_cast<std::size_t>(1 + first + k);
      pass.slots[k] = gather(address(operand), strides_[operand], gathered_[k]);
    }
    pass.is_first = first == 0;
    pass.target = first + pass.num_slots == num_slots ? target : nullptr;
    kernel_.run(pass);
  }
  if (!target_is_array) copy_batch(address(0), strides_[0], scattered_, array_strides());
}

// The batch of one slot as an array: where it lies, or copied to `buffer`.
const char* PlaneReducer::gather(const char* slot, Strides strides, char* buffer) const {
  if (is_array(strides)) return slot;
  copy_batch(buffer, array_strides(), slot, strides);
  return buffer;
}

bool PlaneReducer::is_array(Strides strides) const {
  const Strides array = array_strides();
  return strides.column == array.column && (batch_rows_ == 1 || strides.row == array.row);
}

void PlaneReducer::copy_batch(char* target, Strides target_strides, const char* source,
                              Strides source_strides) const {
  const std::int64_t itemsize = kernel_.itemsize;
  Plane plane = {batch_rows_,
                 batch_columns_,
                 target_strides.row,
                 target_strides.column,
                 source_strides.row,
                 source_strides.column,
                 itemsize};
  if (target_strides.column == itemsize && source_strides.column == itemsize) {
    plane = {
        1, batch_rows_, 0, target_strides.row, 0, source_strides.row, batch_columns_ * itemsize};
  }
  const bool is_transposed = std::llabs(source_strides.row) < std::llabs(source_strides.column) ||
                             target_strides.row < target_strides.column;
  choose_copy_plane(plane, is_transposed)(plane, target, source);
}

}  // namespace tritondt
