#include "boxes/reduce_kernels.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "boxes/reduce_types.h"
#include "cpu/instructions.h"

namespace tritondt {
namespace {

template <typename Type, bool kDivides>
[[gnu::always_inline]] inline typename Type::Storage finish(typename Type::Accumulator total,
                                                            std::int64_t divisor) {
  if constexpr (kDivides) {
    return Type::store(Type::divide(total, static_cast<typename Type::Real>(divisor)));
  } else {
    return Type::store(total);
  }
}

// Elements [first, first + kBlockElements), converted together.
template <typename Type, typename Op, bool kIsFirst, bool kIsLast, bool kDivides, int kSlots>
[[gnu::always_inline]] inline void run_block(const typename Type::Storage* const* slots,
                                             float* accumulators, typename Type::Storage* target,
                                             std::int64_t first, std::int64_t divisor) {
  float totals[kBlockElements];
  float values[kBlockElements];
  Type::Blocks::load_block(slots[0] + first, totals);
  if constexpr (!kIsFirst) {
    for (std::int64_t i = 0; i < kBlockElements; ++i) {
      totals[i] = Op::apply(accumulators[first + i], totals[i]);
    }
  }
  for (int k = 1; k < kSlots; ++k) {
    Type::Blocks::load_block(slots[k] + first, values);
    for (std::int64_t i = 0; i < kBlockElements; ++i) totals[i] = Op::apply(totals[i], values[i]);
  }
  if constexpr (kIsLast) {
    if constexpr (kDivides) {
      for (float& total : totals) total = Type::divide(total, static_cast<float>(divisor));
    }
    for (float& total : totals) total = Type::with_one_nan(total);
    Type::Blocks::store_block(totals, target + first);
  } else {
    std::copy(totals, totals + kBlockElements, accumulators + first);
  }
}

// The slots are added in their order, whatever kSlots: ((a + b) + c) + d.
template <typename Type, typename Op, bool kIsFirst, bool kIsLast, bool kDivides, int kSlots>
[[gnu::always_inline]] inline void run_loop(const ReducePass& pass) {
  using Storage = typename Type::Storage;
  using Accumulator = typename Type::Accumulator;
  const auto slot = [&pass](int k) { return reinterpret_cast<const Storage*>(pass.slots[k]); };
  const Storage* const a = slot(0);
  const Storage* const b = slot(kSlots > 1 ? 1 : 0);
  const Storage* const c = slot(kSlots > 2 ? 2 : 0);
  const Storage* const d = slot(kSlots > 3 ? 3 : 0);
  Accumulator* const accumulators = static_cast<Accumulator*>(pass.accumulators);
  Storage* const target = reinterpret_cast<Storage*>(pass.target);
  const std::int64_t num_elements = pass.num_elements;
  const std::int64_t divisor = pass.divisor;
  std::int64_t first = 0;
  if constexpr (Type::kHasBlocks) {
    const Storage* const slots[] = {a, b, c, d};
    for (; first + kBlockElements <= num_elements; first += kBlockElements) {
      run_block<Type, Op, kIsFirst, kIsLast, kDivides, kSlots>(slots, accumulators, target, first,
                                                               divisor);
    }
  }
  // A target that is one of the slots depends on its own element alone.
#pragma GCC ivdep
  for (std::int64_t i = first; i < num_elements; ++i) {
    Accumulator total = Type::load(a[i]);
    if constexpr (!kIsFirst) total = Op::apply(accumulators[i], total);
    if constexpr (kSlots > 1) total = Op::apply(total, Type::load(b[i]));
    if constexpr (kSlots > 2) total = Op::apply(total, Type::load(c[i]));
    if constexpr (kSlots > 3) total = Op::apply(total, Type::load(d[i]));
    if constexpr (kIsLast) {
      target[i] = finish<Type, kDivides>(total, divisor);
    } else {
      accumulators[i] = total;
    }
  }
}

template <typename Type, typename Op, bool kIsFirst, bool kDivides>
[[gnu::always_inline]] inline void run_last(const ReducePass& pass) {
  static_assert(kMaxGroupSlots == 4);
  switch (pass.num_slots) {
    case 1:
      return run_loop<Type, Op, kIsFirst, true, kDivides, 1>(pass);
    case 2:
      return run_loop<Type, Op, kIsFirst, true, kDivides, 2>(pass);
    case 3:
      return run_loop<Type, Op, kIsFirst, true, kDivides, 3>(pass);
    default:
      return run_loop<Type, Op, kIsFirst, true, kDivides, 4>(pass);
  }
}

template <typename Type, typename Op, bool kDivides>
[[gnu::always_inline]] inline void run_pass(const ReducePass& pass) {
  if (pass.target != nullptr) {
    pass.is_first ? run_last<Type, Op, true, kDivides>(pass)
                  : run_last<Type, Op, false, kDivides>(pass);
  } else {
    pass.is_first ? run_loop<Type, Op, true, false, false, 4>(pass)
                  : run_loop<Type, Op, false, false, false, 4>(pass);
  }
}

// Compiled for the machine that the compiler assumes ...
template <typename Type, typename Op, bool kDivides>
void run_baseline(const ReducePass& pass) {
  run_pass<Type, Op, kDivides>(pass);
}

#if defined(__x86_64__) && defined(__GNUC__)
// ... and for AVX2 with F16C. The bits of a result are the same: no operation is fused with
// another.
template <typename Type, typename Op, bool kDivides>
[[gnu::target("avx2,f16c")]] void run_avx2(const ReducePass& pass) {
  run_pass<typename WithInstructions<Type>::Found, Op, kDivides>(pass);
}
#endif

template <typename Type, typename Op, bool kDivides = false>
ReduceKernel make_kernel() {
  using Storage = typename Type::Storage;
  static_assert(sizeof(typename Type::Accumulator) * kBatchBytes <=
                sizeof(Storage) * kAccumulatorBytes);
  ReduceKernel kernel = {sizeof(Storage), alignof(Storage), run_baseline<Type, Op, kDivides>};
#if defined(__x86_64__) && defined(__GNUC__)
  if (instructions() >= Instructions::kAvx2) kernel.run = run_avx2<Type, Op, kDivides>;
#endif
  return kernel;
}

struct Entry {
  std::string dtype;
  std::string op;
  bool divides;
  ReduceKernel kernel;
};

template <typename Type>
void add_arithmetic(std::vector<Entry>* entries, const char* dtype) {
  entries->push_back({dtype, "sum", false, make_kernel<Type, Sum>()});
  entries->push_back({dtype, "product", false, make_kernel<Type, Product>()});
}

template <typename Type>
void add_average(std::vector<Entry>* entries, const char* dtype) {
  entries->push_back({dtype, "sum", true, make_kernel<Type, Sum, true>()});
}

template <typename Type>
void add_order(std::vector<Entry>* entries, const char* dtype) {
  entries->push_back({dtype, "max", false, make_kernel<Type, Max>()});
  entries->push_back({dtype, "min", false, make_kernel<Type, Min>()});
}

template <typename Type>
void add_integer(std::vector<Entry>* entries, const char* dtype) {
  add_arithmetic<Type>(entries, dtype);
  add_order<Type>(entries, dtype);
}

template <typename Type>
void add_floating_point(std::vector<Entry>* entries, const char* dtype) {
  add_arithmetic<Type>(entries, dtype);
  add_order<Type>(entries, dtype);
  add_average<Type>(entries, dtype);
}

template <typename Type>
void add_complex(std::vector<Entry>* entries, const char* dtype) {
  add_arithmetic<Type>(entries, dtype);
  add_average<Type>(entries, dtype);
}

std::vector<Entry> make_entries() {
  std::vector<Entry> entries;
  add_floating_point<Number<float>>(&entries, "float32");
  add_floating_point<Half<BFloat16Storage>>(&entries, "bfloat16");
  add_floating_point<Half<Float16Storage>>(&entries, "float16");
  add_floating_point<Number<double>>(&entries, "float64");
  add_integer<Number<std::int8_t>>(&entries, "int8");
  add_integer<Number<std::uint8_t>>(&entries, "uint8");
  add_integer<Number<std::int16_t>>(&entries, "int16");
  add_integer<Number<std::int32_t>>(&entries, "int32");
  add_integer<Number<std::int64_t>>(&entries, "int64");
  add_order<Bool>(&entries, "bool");
  add_complex<Complex<float>>(&entries, "complex64");
  add_complex<Complex<double>>(&entries, "complex128");
  return entries;
}

bool lists(const std::string& list, const std::string& name) {
  return (", " + list + ", ").find(", " + name + ", ") != std::string::npos;
}

void append(std::string* list, const std::string& name) {
  if (!lists(*list, name)) *list += (list->empty() ? "" : ", ") + name;
}

[[noreturn]] void refuse(const std::vector<Entry>& entries, const std::string& dtype,
                         const std::string& op, std::int64_t divisor) {
  std::string dtypes;
  std::string ops;
  for (const Entry& entry : entries) {
    append(&dtypes, entry.dtype);
    if (entry.dtype == dtype) append(&ops, entry.op);
  }
  if (ops.empty()) {
    throw std::invalid_argument("dtype '" + dtype + "' has no reductions; allowed are " + dtypes);
  }
  if (!lists(ops, op)) {
    throw std::invalid_argument("op '" + op + "' on dtype '" + dtype + "'; allowed on it are " +
                                ops);
  }
  throw std::invalid_argument(
      "divisor " + std::to_string(divisor) + " with op '" + op + "' on dtype '" + dtype +
      "'; a divisor is 1 or more, and other than 1 only with sum, on floating-point and complex "
      "dtypes");
}

}  // namespace

ReduceKernel find_reduce_kernel(const std::string& dtype, const std::string& op,
                                std::int64_t divisor) {
  static const std::vector<Entry> entries = make_entries();
  for (const Entry& entry : entries) {
    if (entry.dtype == dtype && entry.op == op && divisor >= 1 && entry.divides == (divisor != 1)) {
      return entry.kernel;
    }
  }
  refuse(entries, dtype, op, divisor);
}

}  // namespace tritondt
