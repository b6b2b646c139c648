#include "boxes/cast_plane.h"

namespace tritondt {
namespace {

// Of shorter runs so much is the part of a line at either end that they are no faster without a
// buffer.
constexpr std::int64_t kLeastUnbufferedBytes = 4096;

bool is_row(const CastPlane& plane, Strides strides, std::int64_t itemsize) {
  return plane.num_rows == 1 && strides.column == itemsize;
}

}  // namespace

void PlaneCaster::run(const CastPlane& plane, char* target, const char* source, float factor,
                      LineWriter* writer) {
  const std::int64_t itemsize = kernel_.target_itemsize;
  if (writer != nullptr && plane.num_columns * itemsize >= kLeastUnbufferedBytes &&
      plane.target.column == itemsize && plane.source.column == kernel_.source_itemsize) {
    for (std::int64_t row = 0; row < plane.num_rows; ++row) {
      run_through(source + row * plane.source.row, target + row * plane.target.row,
                  plane.num_columns, factor, writer);
    }
    return;
  }
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

void PlaneCaster::run_through(const char* source, char* target, std::int64_t num_elements,
                              float factor, LineWriter* writer) {
  const auto from = [&](std::int64_t element) {
    return source + element * kernel_.source_itemsize;
  };
  const auto to = [&](std::int64_t element) { return target + element * kernel_.target_itemsize; };
  const auto append = [&](std::int64_t first, std::int64_t end) {
    if (first == end) return;
    kernel_.run({from(first), scattered_, end - first, factor});
    writer->append(to(first), scattered_, to(end) - to(first));
  };
  const auto begin = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target));
  const std::int64_t head = (-begin & (kCacheLineBytes - 1)) / kernel_.target_itemsize;
  append(0, head);
  const std::int64_t body =
      kernel_.run_past_cache({from(head), to(head), num_elements - head, factor});
  append(head + body, num_elements);
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
