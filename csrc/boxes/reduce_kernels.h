#pragma once

#include <cstdint>
#include <string>

#include "boxes/batches.h"

namespace tritondt {

// One pass over a batch reads this many slots at most: fewer passes over the accumulators cost less
// than a further stream of loads. Sums of 16 slots of fp32: 60 GB/s with 4, 7 with 1 (Zen 3, in
// cache).
constexpr std::int64_t kMaxGroupSlots = 4;

// float16 and bfloat16 accumulate in twice their size, nothing in more.
constexpr std::int64_t kAccumulatorBytes = 2 * kBatchBytes;

// One pass: up to kMaxGroupSlots arrays of `num_elements` elements each. `accumulators` is taken in
// unless `is_first`; `target` is written and may be one of the slots, or is null, and then
// `accumulators` is written. A pass without target has kMaxGroupSlots slots.
struct ReducePass {
  const char* slots[kMaxGroupSlots];
  std::int64_t num_slots;
  std::int64_t num_elements;
  void* accumulators;
  bool is_first;
  char* target;
  std::int64_t divisor;
};

struct ReduceKernel {
  std::int64_t itemsize;
  std::int64_t alignment;
  void (*run)(const ReducePass& pass);
};

// The kernel for torch's name of a dtype and for sum, product, max or min. Throws
// std::invalid_argument that says what is allowed, also for a divisor that does not go with them.
ReduceKernel find_reduce_kernel(const std::string& dtype, const std::string& op,
                                std::int64_t divisor);

}  // namespace tritondt
