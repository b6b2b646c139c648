#pragma once

// How recording_nccl writes calls down, and does what a test has told it to.
//
// A call is a line: its name and arguments, addresses as numbers, communicators as c0, c1 and so
// on. A nonblocking communicator is at work for `polls` looks at its state after each call.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "nccl/types.h"

#ifndef RECORDING_VERSION
#define RECORDING_VERSION 23203
#endif
#ifdef RECORDING_NOTHING  // for benchmarks: every call succeeds at once
constexpr bool kRecords = false;
#else
constexpr bool kRecords = true;
#endif

namespace tritondt::nccl {
struct ncclComm {
  int number;
  int rank;
  int num_ranks;
  bool is_blocking;
  int generation;  // of resets
  int polls_left = 0;
  ncclResult_t state = ncclSuccess;
  ncclComm** slot = nullptr;  // where a child goes once this one is done
  ncclComm* child = nullptr;
  std::atomic<bool> is_ended{false};
};
}  // namespace tritondt::nccl

namespace {

using namespace tritondt::nccl;

std::mutex guard;
std::vector<std::string> lines;
std::vector<ncclComm*> comms;                 // since the last reset
std::vector<std::unique_ptr<ncclComm>> kept;  // all, so that a use after the end is seen
std::map<std::string, ncclResult_t> failures;
std::string stuck;  // the function that the next call of gets stuck in, until an abort
int polls = 0;
int generation = 0;
bool has_windows = true;
std::string taken;
[[maybe_unused]] thread_local bool has_collective = false;  // in this group

[[maybe_unused]] std::string text_of(const ncclComm* comm) {
  return comm == nullptr ? "null" : "c" + std::to_string(comm->number);
}
[[maybe_unused]] std::string text_of(const ncclUniqueId& id) {
  return "id" + std::to_string(id.internal[0]);
}
[[maybe_unused]] std::string text_of(const void* pointer) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(pointer));
}
std::string text_of(cudaStream_t stream) { return text_of(static_cast<const void*>(stream)); }
template <typename Number, typename = std::enable_if_t<!std::is_pointer_v<Number>>>
std::string text_of(Number number) {
  return std::to_string(static_cast<long long>(number));
}

// What is set in a configuration, field by field, and what it says about itself.
[[maybe_unused]] std::string text_of(const ncclConfig_t* config) {
  if (config == nullptr) return "default";
  std::string text =
      "{size " + std::to_string(config->size) + " version " + std::to_string(config->version);
  const auto add = [&](const char* name, int value) {
    if (value != kUndefinedInt) text += std::string(" ") + name + " " + std::to_string(value);
  };
  add("blocking", config->blocking);
  add("maxCTAs", config->maxCTAs);
  if (config->netName != nullptr) text += std::string(" netName ") + config->netName;
  add("splitShare", config->splitShare);
  if (config->size >= offsetof(ncclConfig_t, nvlsHostMode) + sizeof(int)) {
    add("CTAPolicy", config->CTAPolicy);
    if (config->commName != nullptr) text += std::string(" commName ") + config->commName;
    add("nvlsHostMode", config->nvlsHostMode);
  }
  return text + "}";
}

[[maybe_unused]] std::string text_of(const ncclCollConfig_t* config) {
  std::string text = "{size " + std::to_string(config->size);
  if (config->maxCTAs != kUndefinedInt) text += " maxCTAs " + std::to_string(config->maxCTAs);
  if (config->algSelection != nullptr) text += std::string(" algSelection ") + config->algSelection;
  text += " force " + std::to_string(config->forceAlgSelection);
  text += " tag " + std::to_string(config->userProfilerTag);
  return text + "}";
}

// Writes a call down; the result that a test has asked for, ncclSuccess otherwise.
template <typename... Arguments>
ncclResult_t record(const char* function, const Arguments&... arguments) {
  if constexpr (!kRecords) return ncclSuccess;
  std::string line = function;
  ((line += " " + text_of(arguments)), ...);
  const std::lock_guard<std::mutex> lock(guard);
  lines.push_back(line);
  const auto found = failures.find(function);
  if (found == failures.end()) return ncclSuccess;
  const ncclResult_t result = found->second;
  failures.erase(found);
  return result;
}

bool is_stuck_in(const char* function) {
  const std::lock_guard<std::mutex> lock(guard);
  return stuck == function;
}

// As NCCL answers a call that went well.
ncclResult_t begin(ncclComm* comm) {
  if (!kRecords || comm->is_blocking) return ncclSuccess;
  const std::lock_guard<std::mutex> lock(guard);
  comm->polls_left = polls;
  return ncclInProgress;
}

template <typename... Arguments>
ncclResult_t run(const char* function, ncclComm* comm, const Arguments&... arguments) {
  if constexpr (!kRecords) return ncclSuccess;
  const ncclResult_t result = record(function, arguments..., comm);
  if (result != ncclSuccess) return result;
  if (comm->is_ended) return ncclInvalidArgument;
  while (is_stuck_in(function) && !comm->is_ended) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return comm->is_ended ? ncclInternalError : begin(comm);
}

ncclComm* make(int rank, int num_ranks, bool is_blocking) {
  const std::lock_guard<std::mutex> lock(guard);
  kept.emplace_back(
      new ncclComm{static_cast<int>(comms.size()), rank, num_ranks, is_blocking, generation});
  comms.push_back(kept.back().get());
  return comms.back();
}

bool is_blocking(const ncclConfig_t* config, const ncclComm* parent) {
  if (config == nullptr) return parent == nullptr || parent->is_blocking;
  return config->blocking != 0;
}

// A child of a nonblocking parent comes to its slot when the parent is done.
ncclResult_t give_child(ncclComm* parent, ncclComm** slot, ncclComm* child) {
  if (begin(parent) == ncclSuccess) {
    *slot = child;
    return ncclSuccess;
  }
  if (child != nullptr) begin(child);
  const std::lock_guard<std::mutex> lock(guard);
  parent->slot = slot;
  parent->child = child;
  return ncclInProgress;
}

}  // namespace

extern "C" {

// What tests call.
const char* recording_take() {
  const std::lock_guard<std::mutex> lock(guard);
  taken.clear();
  for (const std::string& line : lines) taken += line + "\n";
  lines.clear();
  return taken.c_str();
}
void recording_reset() {
  const std::lock_guard<std::mutex> lock(guard);
  lines.clear();
  comms.clear();
  ++generation;
  failures.clear();
  stuck.clear();
  polls = 0;
  has_windows = true;
}
void recording_fail(const char* function, int result) {
  const std::lock_guard<std::mutex> lock(guard);
  failures[function] = static_cast<ncclResult_t>(result);
}
void recording_get_stuck(const char* function) {
  const std::lock_guard<std::mutex> lock(guard);
  stuck = function;
}
void recording_set_polls(int count) {
  const std::lock_guard<std::mutex> lock(guard);
  polls = count;
}
void recording_set_windows(int there) {
  const std::lock_guard<std::mutex> lock(guard);
  has_windows = there != 0;
}
void recording_set_state(int comm, int state) {
  const std::lock_guard<std::mutex> lock(guard);
  comms[comm]->state = static_cast<ncclResult_t>(state);
}

}  // extern "C"
