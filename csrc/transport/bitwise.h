#pragma once

#include <string>

#include "boxes/reduce_kernels.h"

namespace tritondt {

// Whether `op` is torch's name of a bitwise reduction: band, bor or bxor.
bool is_bitwise(const std::string& op);

// The kernel of a bitwise reduction for torch's name of a dtype; of bool, any byte but 0 is true,
// and true is written as 1. Throws std::invalid_argument that says what is allowed.
ReduceKernel find_bitwise_kernel(const std::string& dtype, const std::string& op);

}  // namespace tritondt
