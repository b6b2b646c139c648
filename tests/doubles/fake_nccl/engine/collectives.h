#pragma once

#include <cstddef>
#include <optional>

#include "engine/task.h"

namespace fake_nccl {

// A call of a collective; `op`, `factor` and `root` where it has them.
struct Call {
  Collective collective;
  const void* source;
  void* target;
  std::size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  std::optional<Factor> factor = std::nullopt;
  int root = 0;
};

// Every collective is messages between pairs of ranks, then copies or one reduction. `count` is
// what it means in NCCL: the elements of one rank's piece where there are pieces.
Task plan(const Call& call, int rank, int num_ranks);

}  // namespace fake_nccl
