#pragma once

#include <atomic>
#include <cstdint>

namespace tritondt {

// A futex in shared memory at which one rank sleeps, its own, and which the others ring.
//
// A rank says how many rings it lacks, so that of several peers the last one wakes it, and with it
// nobody else.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> wanted;  // the count of rings that wakes its rank; 0 while it is awake
};

static_assert(sizeof(Bell::rings) == 4, "a futex has 4 bytes");

// Sleeps until the bell has rung `lacking` times since it had `seen`; false after a slice of 20 ms
// without.
bool sleep_at(Bell* bell, std::uint32_t seen, std::uint32_t lacking);

// Wakes the rank that sleeps at the bell, if one does.
void wake_at(Bell* bell);

// Counts a ring, and wakes the rank where it is the last one that it lacks.
void ring(Bell* bell);

}  // namespace tritondt
