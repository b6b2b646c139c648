#include "engine/reduction.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/small_floats.h"

namespace fake_nccl {
namespace {

// How elements of a dtype are stored, and in what they are computed.
template <typename Type>
struct Plain {
  using Stored = Type;
  using Computed = Type;
  static Computed load(Stored stored) { return stored; }
  static Stored store(Computed value) { return value; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Computed = float;
  static float load(Stored stored) { return tritondt::bfloat16_to_float(stored); }
  static Stored store(float value) { return tritondt::float_to_bfloat16(value); }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Computed = float;
  static float load(Stored stored) { return tritondt::Float16Bits::to_float(stored); }
  static Stored store(float value) {
    return static_cast<Stored>(tritondt::Float16Bits::from_float(value));
  }
};

// Eight bits: a sign, an exponent, a mantissa. Slow, by a table of all values.
template <int kMantissaBits, int kLargest>
struct Float8 {
  using Stored = std::uint8_t;
  using Computed = float;

  static const std::array<float, 128>& values() {
    static const std::array<float, 128> made = [] {
      constexpr int kBias = (1 << (6 - kMantissaBits)) - 1;
      constexpr int kMantissas = 1 << kMantissaBits;
      std::array<float, 128> all;
      for (int code = 0; code < 128; ++code) {
        const int exponent = code / kMantissas, mantissa = code % kMantissas;
        const int significand = exponent == 0 ? mantissa : mantissa + kMantissas;
        all[static_cast<std::size_t>(code)] =
            std::ldexp(static_cast<float>(significand),
                       (exponent == 0 ? 1 : exponent) - kBias - kMantissaBits);
        if (code > kLargest) {
          const bool is_infinity = kMantissaBits == 2 && code == kLargest + 1;
          all[static_cast<std::size_t>(code)] = is_infinity
                                                    ? std::numeric_limits<float>::infinity()
                                                    : std::numeric_limits<float>::quiet_NaN();
        }
      }
      return all;
    }();
    return made;
  }

  static float load(Stored stored) {
    const float magnitude = values()[stored & 0x7f];
    return (stored & 0x80) != 0 ? -magnitude : magnitude;
  }

  // The nearest value, ties to an even code, no further than the largest.
  static Stored store(float value) {
    const auto sign = static_cast<Stored>(std::signbit(value) ? 0x80 : 0);
    if (std::isnan(value)) return static_cast<Stored>(sign | 0x7f);
    const float magnitude = std::fabs(value);
    int above = 0;
    while (above < kLargest && values()[static_cast<std::size_t>(above)] < magnitude) ++above;
    int code = above;
    if (above > 0) {
      const float up = values()[static_cast<std::size_t>(above)] - magnitude;
      const float down = magnitude - values()[static_cast<std::size_t>(above - 1)];
      if (down < up || (down == up && above % 2 == 1)) --code;
    }
    return static_cast<Stored>(sign | code);
  }
};

// Calls visit(codec) for the dtype.
template <typename Visit>
void with_codec(ncclDataType_t dtype, const Visit& visit) {
  switch (dtype) {
    case ncclInt8:
      return visit(Plain<std::int8_t>());
    case ncclUint8:
      return visit(Plain<std::uint8_t>());
    case ncclInt32:
      return visit(Plain<std::int32_t>());
    case ncclUint32:
      return visit(Plain<std::uint32_t>());
    case ncclInt64:
      return visit(Plain<std::int64_t>());
    case ncclUint64:
      return visit(Plain<std::uint64_t>());
    case ncclFloat16:
      return visit(Float16());
    case ncclFloat32:
      return visit(Plain<float>());
    case ncclFloat64:
      return visit(Plain<double>());
    case ncclBfloat16:
      return visit(Bfloat16());
    case ncclFloat8e4m3:
      return visit(Float8<3, 0x7e>());
    case ncclFloat8e5m2:
      return visit(Float8<2, 0x7b>());
    case ncclNumTypes:
      return;
  }
}

// Whole numbers wrap around, which is defined for those without a sign; products of the small ones
// are of type int, so 64 bits for all.
template <typename Number>
Number multiply(Number a, Number b) {
  if constexpr (std::is_integral_v<Number>) {
    return static_cast<Number>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename Number>
Number combine(ncclRedOp_t op, Number a, Number b) {
  if (op == ncclProd) return multiply(a, b);
  if (op == ncclMax) return b > a ? b : a;
  if (op == ncclMin) return b < a ? b : a;
  if constexpr (std::is_integral_v<Number>) {
    return static_cast<Number>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename Stored>
Stored stored_at(const void* elements, std::size_t index) {
  Stored stored;
  std::memcpy(&stored, static_cast<const char*>(elements) + index * sizeof stored, sizeof stored);
  return stored;
}

template <typename Stored>
void store_at(void* elements, std::size_t index, Stored stored) {
  std::memcpy(static_cast<char*>(elements) + index * sizeof stored, &stored, sizeof stored);
}

}  // namespace

std::size_t size_of(ncclDataType_t dtype) {
  std::size_t size = 0;
  with_codec(dtype, [&](auto codec) { size = sizeof(typename decltype(codec)::Stored); });
  return size;
}

void scale(const Scaling& scaling) {
  const void* place = scaling.factor.place == nullptr ? scaling.factor.value : scaling.factor.place;
  with_codec(scaling.factor.dtype, [&](auto codec) {
    using Codec = decltype(codec);
    using Stored = typename Codec::Stored;
    const auto factor = Codec::load(stored_at<Stored>(place, 0));
    for (std::size_t i = 0; i < scaling.count; ++i) {
      const auto value = Codec::load(stored_at<Stored>(scaling.source, i));
      store_at(scaling.target, i, Codec::store(multiply(value, factor)));
    }
  });
}

void reduce(const Reduction& reduction) {
  with_codec(reduction.dtype, [&](auto codec) {
    using Codec = decltype(codec);
    using Stored = typename Codec::Stored;
    using Computed = typename Codec::Computed;
    const auto num_slots = static_cast<Computed>(reduction.slots.size());
    for (std::size_t i = 0; i < reduction.count; ++i) {
      Computed result = Codec::load(stored_at<Stored>(reduction.slots[0], i));
      for (std::size_t slot = 1; slot < reduction.slots.size(); ++slot) {
        result =
            combine(reduction.op, result, Codec::load(stored_at<Stored>(reduction.slots[slot], i)));
      }
      if (reduction.op == ncclAvg) result = static_cast<Computed>(result / num_slots);
      store_at(reduction.target, i, Codec::store(result));
    }
  });
}

}  // namespace fake_nccl
