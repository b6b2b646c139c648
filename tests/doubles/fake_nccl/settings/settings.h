#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "settings/faults.h"

namespace fake_nccl {

// What the environment, or `set`, asks of the double; README.md has the table.
struct Settings {
  std::atomic<int> version;
  std::atomic<std::size_t> ring_bytes;
  std::atomic<std::int64_t> delay_ms;
  std::atomic<std::int64_t> join_ms;
  std::atomic<bool> reports_lost_peers;
  std::atomic<bool> reports_mismatches;
  std::atomic<bool> has_symmetric_memory;
  std::atomic<int> lsa_ranks;  // that reach each other's windows; 0 for all
};
Settings& settings();

// Changes a setting of this process. False where there is no such setting, or no such value.
bool set(const std::string& name, const std::string& value);

// What is to become of a call; one of a function that the version played does not have fails.
Fate fate_of(Function function);

}  // namespace fake_nccl
