#pragma once

#include <algorithm>
#include <cstdint>

namespace tritondt {

// Bytes of one operand that kernels for arrays work on at a time: what lies between two steps stays
// in the first-level cache, and it is one tile of a transposing copy.
constexpr std::int64_t kBatchBytes = 4096;

// In bytes.
struct Strides {
  std::int64_t row;
  std::int64_t column;
};

// A part of a plane that is turned into an array, where it is none, for kernels see arrays only.
struct Batch {
  std::int64_t num_rows;
  std::int64_t num_columns;

  std::int64_t num_elements() const { return num_rows * num_columns; }
  Strides array_strides(std::int64_t itemsize) const { return {num_columns * itemsize, itemsize}; }

  // Whether elements at these strides lie one behind the other.
  bool is_array(Strides strides, std::int64_t itemsize) const {
    return strides.column == itemsize && (num_rows == 1 || strides.row == num_columns * itemsize);
  }

  void copy(std::int64_t itemsize, char* target, Strides target_strides, const char* source,
            Strides source_strides) const;

  // The elements as an array: where they lie, or copied to `buffer`.
  const char* as_array(const char* source, Strides strides, std::int64_t itemsize,
                       char* buffer) const;
};

// How large the batches of a plane may be, for elements of up to `itemsize` bytes. With
// `is_transposed`, a tile of a transposing copy: one cache line by 64 columns.
Batch largest_batch(std::int64_t num_columns, std::int64_t itemsize, bool is_transposed);

// Calls visit(batch, first_row, first_column) until the plane is covered.
template <typename Visit>
void for_each_batch(std::int64_t num_rows, std::int64_t num_columns, const Batch& largest,
                    const Visit& visit) {
  for (std::int64_t column = 0; column < num_columns; column += largest.num_columns) {
    for (std::int64_t row = 0; row < num_rows; row += largest.num_rows) {
      visit(Batch{std::min(largest.num_rows, num_rows - row),
                  std::min(largest.num_columns, num_columns - column)},
            row, column);
    }
  }
}

}  // namespace tritondt
