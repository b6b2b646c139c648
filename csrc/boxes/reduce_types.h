#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/number_types.h"

// What a reduction does with one element, per dtype (Storage in memory, Accumulator while it lasts)
// and per op. Templates that reduce_kernels.cpp puts together.
namespace tritondt {

// Floating-point types of the machine, and signed or unsigned integers, which wrap.
template <typename T>
struct Number {
  using Storage = T;
  using Accumulator = T;
  using Real = T;  // what a divisor is converted to
  static constexpr bool kHasBlocks = false;
  [[gnu::always_inline]] static T load(T x) { return x; }
  [[gnu::always_inline]] static T store(T x) { return x; }
  [[gnu::always_inline]] static T divide(T x, T divisor) { return x / divisor; }
};

// Of 16 bits: read to float32, and rounded to `Stored` once. Which of two NaN a sum keeps depends
// on the order of an instruction's operands, so that all become one.
template <typename Stored>
struct Half : Number<float> {
  using Storage = typename Stored::Storage;
  using Blocks = Stored;
  static constexpr bool kHasBlocks = Stored::kHasBlocks;
  [[gnu::always_inline]] static float load(Storage x) { return Stored::load(x); }
  [[gnu::always_inline]] static float with_one_nan(float x) {
    return float_of(select(x == x, bits_of(x), kInfinityBits | kQuietBit));
  }
  [[gnu::always_inline]] static Storage store(float x) { return Stored::store(with_one_nan(x)); }
};

template <typename Stored>
struct WithInstructions<Half<Stored>> {
  using Found = Half<typename WithInstructions<Stored>::Found>;
};

// Any byte but 0 is true; true is written as 1. max is or, min is and.
struct Bool : Number<std::uint8_t> {
  [[gnu::always_inline]] static std::uint8_t load(std::uint8_t x) { return x != 0; }
};

template <typename T>
struct ComplexValue {
  T real;
  T imag;
};

template <typename T>
struct Complex : Number<ComplexValue<T>> {
  using Real = T;
  using Value = ComplexValue<T>;
  [[gnu::always_inline]] static Value divide(Value x, T divisor) {
    return {x.real / divisor, x.imag / divisor};
  }
};

// Arithmetic of integers in a type that wraps and is not promoted to a signed one.
template <typename T, bool kIsInteger = std::is_integral_v<T>>
struct Wrapping {
  using Type = T;
};
template <typename T>
struct Wrapping<T, true> {
  using Type = std::conditional_t<sizeof(T) < sizeof(unsigned), unsigned, std::make_unsigned_t<T>>;
};

struct Sum {
  template <typename T>
  [[gnu::always_inline]] static T apply(T x, T y) {
    using Arithmetic = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<Arithmetic>(x) + static_cast<Arithmetic>(y));
  }
  template <typename T>
  [[gnu::always_inline]] static ComplexValue<T> apply(ComplexValue<T> x, ComplexValue<T> y) {
    return {x.real + y.real, x.imag + y.imag};
  }
};

struct Product {
  template <typename T>
  [[gnu::always_inline]] static T apply(T x, T y) {
    using Arithmetic = typename Wrapping<T>::Type;
    return static_cast<T>(static_cast<Arithmetic>(x) * static_cast<Arithmetic>(y));
  }
  template <typename T>
  [[gnu::always_inline]] static ComplexValue<T> apply(ComplexValue<T> x, ComplexValue<T> y) {
    return {x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real};
  }
};

// Of equal values the first is kept (-0.0 and 0.0 are equal); NaN wins over everything. The bitwise
// or evaluates both sides, as a vector does.
struct Max {
  template <typename T>
  [[gnu::always_inline]] static T apply(T x, T y) {
    return (y > x) | (y != y) ? y : x;
  }
};

struct Min {
  template <typename T>
  [[gnu::always_inline]] static T apply(T x, T y) {
    return (y < x) | (y != y) ? y : x;
  }
};

}  // namespace tritondt
