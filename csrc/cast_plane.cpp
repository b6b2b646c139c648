#include "cast_plane.h"

namespace tritondt {
namespace {

bool is_row(const CastPlane& plane, Strides strides, std::int64_t itemsize) {
  return plane.num_rows == 1 && strides.column == itemsize;
}

}  // namespace

void PlaneCaster::run(const CastPlane& plane, char* target, const char* source, float factor,
                      LineWriter* writer) {
  const std::int64_t itemsize = kernel_.target_itemsize;
  const bool is_buffered = writer != nullptr || !is_row(plane, plane.target, itemsize);
  for_each_batch(
      plane.num_rows, plane.num_columns, largest_batch_of(plane, is_buffered),
      [&](const Batch& batch, std::int64_t row, std::int64_t column) {
        const char* const from = source + row * plane.source.row + column * plane.source.column;
        char* const to = target + row * plane.target.row + column * plane.target.column;
        const bool is_in_place = writer == nullptr && batch.is_array(plane.target, itemsize);
        kernel_.run({batch.as_array(from, plane.source, kernel_.source_itemsize, gathered_),
                     is_in_place ? to : scattered_, batch.num_elements(), factor});
        if (!is_in_place) scatter(batch, to, plane.target, writer);
      });
}

std::uint32_t PlaneCaster::largest_magnitude(const CastPlane& plane, const char* source) {
  std::uint32_t largest = 0;
  for_each_batch(plane.num_rows, plane.num_columns, largest_batch_of(plane, false),
                 [&](const Batch& batch, std::int64_t row, std::int64_t column) {
                   const char* const from =
                       source + row * plane.source.row + column * plane.source.column;
                   const char* const array =
                       batch.as_array(from, plane.source, kernel_.source_itemsize, gathered_);
                   largest = std::max(largest, kernel_.largest(array, batch.num_elements()));
                 });
  return largest;
}

// Without buffers, their size is no limit.
Batch PlaneCaster::largest_batch_of(const CastPlane& plane, bool is_buffered) const {
  if (!is_buffered && is_row(plane, plane.source, kernel_.source_itemsize)) {
    return {1, plane.num_columns};
  }
  const std::int64_t itemsize = std::max(kernel_.source_itemsize, kernel_.target_itemsize);
  return largest_batch(plane.num_columns, itemsize, plane.is_transposed);
}

void PlaneCaster::scatter(const Batch& batch, char* target, Strides strides,
                          LineWriter* writer) const {
  const std::int64_t itemsize = kernel_.target_itemsize;
  const std::int64_t row_bytes = batch.num_columns * itemsize;
  if (writer == nullptr || strides.column != itemsize) {
    batch.copy(itemsize, target, strides, scattered_, batch.array_strides(itemsize));
  } else if (batch.is_array(strides, itemsize)) {
    writer->append(target, scattered_, batch.num_rows * row_bytes);
  } else {
    for (std::int64_t row = 0; row < batch.num_rows; ++row) {
      writer->append(target + row * strides.row, scattered_ + row * row_bytes, row_bytes);
    }
  }
}

}  // namespace tritondt
