#pragma once

#include <string>

namespace tritondt {

// Sets of instructions that there are functions for. Whatever the set, the bits of a result are the
// same.
enum class Instructions {
  kBaseline,  // what the compiler assumes
  kAvx2,      // AVX2 and F16C
  kAvx512,    // these, AVX-512F and AVX-512BW
};

// The largest set that the machine has and limit_instructions allows; the same from the first call
// on.
Instructions instructions();

// Allows sets up to the one that is named: baseline, avx2 or avx512. Throws std::invalid_argument
// for another name, and std::logic_error after the first call of instructions().
void limit_instructions(const std::string& name);

}  // namespace tritondt
