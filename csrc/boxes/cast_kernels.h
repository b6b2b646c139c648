#pragma once

#include <cstdint>
#include <string>

namespace tritondt {

// One array of numbers from one dtype to another: target = source * factor, by way of float32.
struct CastPass {
  const char* source;
  char* target;
  std::int64_t num_elements;
  float factor;  // 1 where nothing is scaled
};

struct CastKernel {
  std::int64_t source_itemsize;  // and alignment
  std::int64_t target_itemsize;
  void (*run)(const CastPass& pass);
  // Writes whole blocks past the cache, to a target at the start of a line; returns how many
  // elements they hold, for the rest is not written.
  std::int64_t (*run_past_cache)(const CastPass& pass);
  // The bits of the largest finite magnitude of an array, as a float32; 0 where there is none.
  std::uint32_t (*largest)(const char* source, std::int64_t num_elements);
  float target_max;  // the largest number of an 8-bit target
};

enum class CastVerb { kCast, kQuantize, kDequantize };

// The kernel for torch's names of two dtypes. Throws std::invalid_argument that says what the verb
// allows.
CastKernel find_cast_kernel(CastVerb verb, const std::string& source_dtype,
                            const std::string& target_dtype);

}  // namespace tritondt
