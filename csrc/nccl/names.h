#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "nccl/api.h"
#include "nccl/calls.h"

// What Python calls dtypes, operators and operations; unknown names throw std::invalid_argument
// with those that are known.
namespace tritondt::nccl {

CallKind kind_of(const std::string& name);

// By torch's names. Throws Unsupported for a dtype that the library is too old for.
ncclDataType_t dtype_of(const std::string& name, const Library& library);

// "sum", "product", "max", "min", "avg", or the number of one that NCCL has made.
using OpName = std::variant<std::string, std::int64_t>;
ncclRedOp_t op_of(const OpName& name);

// A number as one element of a dtype, in the first bytes of the result. Throws
// std::invalid_argument where the dtype has no such number, or is one of 8-bit floating point.
using Factor = std::variant<std::int64_t, double>;
std::uint64_t element_of(const Factor& factor, ncclDataType_t dtype);

}  // namespace tritondt::nccl
