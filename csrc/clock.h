#pragma once

#include <time.h>

#include <cstdint>

namespace tritondt {

inline std::int64_t clock_ns(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// CLOCK_MONOTONIC in ns; 20 ns, no system call.
inline std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

}  // namespace tritondt
