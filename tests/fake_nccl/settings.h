#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "nccl_abi.h"

namespace fake_nccl {

// NCCL's functions by their own names, as functions.def lists them.
enum class Function {
#define FUNCTION(name, since) name,
#include "functions.def"
#undef FUNCTION
};

// What the environment, or `set`, asks of the double; README.md has the table.
struct Settings {
  std::atomic<int> version;
  std::atomic<std::size_t> ring_bytes;
  std::atomic<std::int64_t> delay_ms;
  std::atomic<bool> reports_lost_peers;
  std::atomic<bool> reports_mismatches;
  std::atomic<bool> has_symmetric_memory;
};
Settings& settings();

// Changes a setting of this process. False where there is no such setting, or no such value.
bool set(const std::string& name, const std::string& value);

// What is to become of one call.
struct Fate {
  ncclResult_t failure = ncclSuccess;      // returned at once
  ncclResult_t async_error = ncclSuccess;  // met when the operation runs
  bool stalls = false;                     // the operation never comes to its end
};

// Counts a call of `function`; a function that the version played does not have fails.
Fate fate_of(Function function);
const char* name_of(Function function);

// Keeps what ncclGetLastError says, and hands the result back.
ncclResult_t failed(ncclResult_t result, const std::string& text);
const char* last_error();

std::string version_text(int version);

}  // namespace fake_nccl
