#include "transport/bitwise.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace tritondt {
namespace {

struct And {
  template <typename T>
  static T apply(T x, T y) {
    return static_cast<T>(x & y);
  }
};

struct Or {
  template <typename T>
  static T apply(T x, T y) {
    return static_cast<T>(x | y);
  }
};

struct Xor {
  template <typename T>
  static T apply(T x, T y) {
    return static_cast<T>(x ^ y);
  }
};

// Signs make no difference to bits.
template <typename T>
struct Bits {
  using Storage = T;
  static T load(T x) { return x; }
};

struct TruthValue {
  using Storage = std::uint8_t;
  static std::uint8_t load(std::uint8_t x) { return x != 0; }
};

// A block of totals stays in the first-level cache while the slots are taken in, each in a loop of
// its own. The target is written last, as it may be one of the slots.
template <typename Type, typename Op>
void run_pass(const ReducePass& pass) {
  using Storage = typename Type::Storage;
  constexpr std::int64_t kBlockElements = 4096 / static_cast<std::int64_t>(sizeof(Storage));
  Storage totals[kBlockElements];
  Storage* const accumulators = static_cast<Storage*>(pass.accumulators);
  for (std::int64_t first = 0; first < pass.num_elements; first += kBlockElements) {
    const std::int64_t count = std::min(kBlockElements, pass.num_elements - first);
    const auto slot = [&](std::int64_t k) {
      return reinterpret_cast<const Storage*>(pass.slots[k]) + first;
    };
    const Storage* const front = slot(0);
    for (std::int64_t i = 0; i < count; ++i) totals[i] = Type::load(front[i]);
    if (!pass.is_first) {
      const Storage* const before = accumulators + first;
      for (std::int64_t i = 0; i < count; ++i) totals[i] = Op::apply(before[i], totals[i]);
    }
    for (std::int64_t k = 1; k < pass.num_slots; ++k) {
      const Storage* const term = slot(k);
      for (std::int64_t i = 0; i < count; ++i) {
        totals[i] = Op::apply(totals[i], static_cast<Storage>(Type::load(term[i])));
      }
    }
    Storage* const to = pass.target == nullptr ? accumulators + first
                                               : reinterpret_cast<Storage*>(pass.target) + first;
    std::memcpy(to, totals, static_cast<std::size_t>(count) * sizeof(Storage));
  }
}

template <typename Type>
ReduceKernel kernel_of(const std::string& op) {
  using Storage = typename Type::Storage;
  const auto run = op == "band"  ? run_pass<Type, And>
                   : op == "bor" ? run_pass<Type, Or>
                                 : run_pass<Type, Xor>;
  return {sizeof(Storage), alignof(Storage), run};
}

}  // namespace

bool is_bitwise(const std::string& op) { return op == "band" || op == "bor" || op == "bxor"; }

ReduceKernel find_bitwise_kernel(const std::string& dtype, const std::string& op) {
  if (is_bitwise(op)) {
    if (dtype == "bool") return kernel_of<TruthValue>(op);
    if (dtype == "uint8" || dtype == "int8") return kernel_of<Bits<std::uint8_t>>(op);
    if (dtype == "int16") return kernel_of<Bits<std::uint16_t>>(op);
    if (dtype == "int32") return kernel_of<Bits<std::uint32_t>>(op);
    if (dtype == "int64") return kernel_of<Bits<std::uint64_t>>(op);
  }
  throw std::invalid_argument(
      "op '" + op + "' on dtype '" + dtype +
      "'; bitwise are band, bor and bxor, on bool, uint8, int8, int16, int32 and int64");
}

}  // namespace tritondt
