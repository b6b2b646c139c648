#pragma once

#include <cstddef>
#include <vector>

#include "interface/nccl_abi.h"

namespace fake_nccl {

std::size_t size_of(ncclDataType_t dtype);

// A factor on what this rank gives: a value of the dtype, or where one will be when it is used.
struct Factor {
  ncclDataType_t dtype;
  const void* place;
  alignas(8) char value[8];
};

// Elements times a factor, rounded to their dtype.
struct Scaling {
  Factor factor;
  const void* source;
  void* target;
  std::size_t count;
};
void scale(const Scaling& scaling);

// One slot per rank, added in their order: in float32 for what is smaller, with one rounding.
struct Reduction {
  ncclDataType_t dtype;
  ncclRedOp_t op;  // a sum with a factor is a sum here
  std::vector<const void*> slots;
  void* target;  // may be one of the slots
  std::size_t count;
};
void reduce(const Reduction& reduction);

}  // namespace fake_nccl
