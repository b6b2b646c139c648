#include "cpu/instructions.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace tritondt {
namespace {

std::mutex& mutex() {
  static std::mutex made;
  return made;
}

Instructions limit = Instructions::kAvx512;
bool is_found = false;

Instructions of_machine() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) {
    return Instructions::kBaseline;
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
             ? Instructions::kAvx512
             : Instructions::kAvx2;
#else
  return Instructions::kBaseline;
#endif
}

Instructions named(const std::string& name) {
  if (name == "baseline") return Instructions::kBaseline;
  if (name == "avx2") return Instructions::kAvx2;
  if (name == "avx512") return Instructions::kAvx512;
  throw std::invalid_argument("instructions '" + name + "'; allowed are baseline, avx2, avx512");
}

}  // namespace

Instructions instructions() {
  static const Instructions found = [] {
    const std::lock_guard<std::mutex> lock(mutex());
    is_found = true;
    return std::min(of_machine(), limit);
  }();
  return found;
}

void limit_instructions(const std::string& name) {
  const Instructions wanted = named(name);
  const std::lock_guard<std::mutex> lock(mutex());
  if (is_found) {
    throw std::logic_error("instructions are limited to '" + name +
                           "' after a table was made; they are limited before the first one");
  }
  limit = wanted;
}

}  // namespace tritondt
