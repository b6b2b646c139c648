#pragma once

#include <cstdint>

#include "boxes/batches.h"
#include "boxes/cast_kernels.h"
#include "boxes/line_writer.h"

namespace tritondt {

// Two nested loops around an element.
struct CastPlane {
  std::int64_t num_rows;
  std::int64_t num_columns;
  Strides target;
  Strides source;
  bool is_transposed;
};

// Casts planes batch by batch, through buffers where elements do not lie one behind the other.
class PlaneCaster {
 public:
  explicit PlaneCaster(const CastKernel& kernel) : kernel_(kernel) {}

  // target = source * factor; written through `writer` unless it is null.
  void run(const CastPlane& plane, char* target, const char* source, float factor,
           LineWriter* writer);

  // The bits of the largest finite magnitude of the source.
  std::uint32_t largest_magnitude(const CastPlane& plane, const char* source);

 private:
  // A run that is written past the cache, whole lines of it without a buffer.
  void run_through(const char* source, char* target, std::int64_t num_elements, float factor,
                   LineWriter* writer);
  Batch largest_batch_of(const CastPlane& plane, bool is_buffered) const;
  void scatter(const Batch& batch, char* target, Strides strides, LineWriter* writer) const;

  const CastKernel& kernel_;
  alignas(64) char gathered_[kBatchBytes];
  alignas(64) char scattered_[kBatchBytes];
};

}  // namespace tritondt
