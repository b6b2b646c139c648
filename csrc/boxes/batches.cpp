#include "boxes/batches.h"

#include <cstdlib>

#include "boxes/copy_planes.h"

namespace tritondt {
namespace {

constexpr std::int64_t kTransposedColumns = 64;

}  // namespace

void Batch::copy(std::int64_t itemsize, char* target, Strides target_strides, const char* source,
                 Strides source_strides) const {
  Plane plane = {num_rows,
                 num_columns,
                 target_strides.row,
                 target_strides.column,
                 source_strides.row,
                 source_strides.column,
                 itemsize};
  if (target_strides.column == itemsize && source_strides.column == itemsize) {
    plane = {1, num_rows, 0, target_strides.row, 0, source_strides.row, num_columns * itemsize};
  }
  const bool is_transposed = std::llabs(source_strides.row) < std::llabs(source_strides.column) ||
                             target_strides.row < target_strides.column;
  choose_copy_plane(plane, is_transposed)(plane, target, source);
}

const char* Batch::as_array(const char* source, Strides strides, std::int64_t itemsize,
                            char* buffer) const {
  if (is_array(strides, itemsize)) return source;
  copy(itemsize, buffer, array_strides(itemsize), source, strides);
  return buffer;
}

Batch largest_batch(std::int64_t num_columns, std::int64_t itemsize, bool is_transposed) {
  const std::int64_t num_elements = kBatchBytes / itemsize;
  const std::int64_t columns =
      std::min(is_transposed ? kTransposedColumns : num_elements, num_columns);
  return {std::max<std::int64_t>(1, num_elements / columns), columns};
}

}  // namespace tritondt
