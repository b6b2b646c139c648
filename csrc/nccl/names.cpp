#include "nccl/names.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "cpu/small_floats.h"

namespace tritondt::nccl {
namespace {

struct Dtype {
  const char* name;
  ncclDataType_t dtype;
  int since;
};

constexpr Dtype kDtypes[] = {
    {"int8", ncclInt8, 20000},
    {"uint8", ncclUint8, 20000},
    {"int32", ncclInt32, 20000},
    {"uint32", ncclUint32, 20000},
    {"int64", ncclInt64, 20000},
    {"uint64", ncclUint64, 20000},
    {"float16", ncclFloat16, 20000},
    {"float32", ncclFloat32, 20000},
    {"float64", ncclFloat64, 20000},
    {"bfloat16", ncclBfloat16, 21003},
    {"float8_e4m3fn", ncclFloat8e4m3, 22403},
    {"float8_e5m2", ncclFloat8e5m2, 22403},
};

struct Op {
  const char* name;
  ncclRedOp_t op;
};

constexpr Op kOps[] = {
    {"sum", ncclSum}, {"product", ncclProd}, {"max", ncclMax}, {"min", ncclMin}, {"avg", ncclAvg}};

struct Kind {
  const char* name;
  CallKind kind;
};

constexpr Kind kKinds[] = {
    {"all_gather", CallKind::kAllGather},
    {"reduce_scatter", CallKind::kReduceScatter},
    {"all_reduce", CallKind::kAllReduce},
    {"broadcast", CallKind::kBroadcast},
    {"reduce", CallKind::kReduce},
    {"all_to_all", CallKind::kAllToAll},
    {"gather", CallKind::kGather},
    {"scatter", CallKind::kScatter},
    {"send", CallKind::kSend},
    {"recv", CallKind::kRecv},
};

template <typename Row, std::size_t kNumRows>
const Row& row_of(const Row (&rows)[kNumRows], const char* what, const std::string& name) {
  for (const Row& row : rows) {
    if (name == row.name) return row;
  }
  std::string known;
  for (const Row& row : rows) known += (known.empty() ? "" : ", ") + std::string(row.name);
  throw std::invalid_argument("the " + std::string(what) + " '" + name +
                              "' was asked for; NCCL has " + known);
}

template <typename Element>
std::uint64_t bits_of_element(Element element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &element, sizeof(element));
  return bits;
}

template <typename Integer>
std::uint64_t integer_of(const Factor& factor) {
  const auto* number = std::get_if<std::int64_t>(&factor);
  if (number == nullptr) {
    throw std::invalid_argument("the factor " + std::to_string(std::get<double>(factor)) +
                                " was given for a dtype of integers; it must be an int");
  }
  const auto element = static_cast<Integer>(*number);
  const bool has_sign = std::is_signed_v<Integer> || *number >= 0;
  if (!has_sign || static_cast<std::int64_t>(element) != *number) {
    throw std::invalid_argument("the factor " + std::to_string(*number) +
                                " is out of the range of its dtype");
  }
  return bits_of_element(element);
}

double real_of(const Factor& factor) {
  const auto* number = std::get_if<std::int64_t>(&factor);
  return number != nullptr ? static_cast<double>(*number) : std::get<double>(factor);
}

}  // namespace

CallKind kind_of(const std::string& name) { return row_of(kKinds, "operation", name).kind; }

ncclDataType_t dtype_of(const std::string& name, const Library& library) {
  const Dtype& found = row_of(kDtypes, "dtype", name);
  if (found.since > library.version()) {
    throw_unsupported(library.description(), "the dtype " + name, found.since);
  }
  return found.dtype;
}

ncclRedOp_t op_of(const OpName& name) {
  if (const auto* text = std::get_if<std::string>(&name)) return row_of(kOps, "op", *text).op;
  const std::int64_t number = std::get<std::int64_t>(name);
  if (number < ncclNumOps || number > ncclMaxRedOp) {
    throw std::invalid_argument("the op " + std::to_string(number) +
                                " was asked for; numbers are those that pre_mul_sum returned");
  }
  return static_cast<ncclRedOp_t>(number);
}

std::uint64_t element_of(const Factor& factor, ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
      return integer_of<std::int8_t>(factor);
    case ncclUint8:
      return integer_of<std::uint8_t>(factor);
    case ncclInt32:
      return integer_of<std::int32_t>(factor);
    case ncclUint32:
      return integer_of<std::uint32_t>(factor);
    case ncclInt64:
      return integer_of<std::int64_t>(factor);
    case ncclUint64:
      return integer_of<std::uint64_t>(factor);
    case ncclFloat16:
      return bits_of_element(
          static_cast<std::uint16_t>(Float16Bits::from_float(static_cast<float>(real_of(factor)))));
    case ncclFloat32:
      return bits_of_element(static_cast<float>(real_of(factor)));
    case ncclFloat64:
      return bits_of_element(real_of(factor));
    case ncclBfloat16:
      return bits_of_element(float_to_bfloat16(static_cast<float>(real_of(factor))));
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      break;
  }
  throw std::invalid_argument("a factor for 8-bit floating point was given; NCCL takes none");
}

}  // namespace tritondt::nccl
