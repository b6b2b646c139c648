#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 23203
#endif

namespace fake_nccl {
namespace {

struct Known {
  const char* name;
  int since;
};

constexpr Known kFunctions[] = {
#define FUNCTION(name, since) {#name, since},
#include "functions.def"
#undef FUNCTION
};

enum class Effect { kFail, kStall, kAsync };

// Strikes when `function` has been called `calls_left` more times, once.
struct Fault {
  Effect effect;
  std::size_t function;
  long calls_left;
  ncclResult_t result;
};

// What changes under a lock. Never destroyed: threads of streams outlive static objects.
struct State {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::set<std::string> texts;  // all that ncclGetLastError ever returned, so none goes away
};

State& state() {
  static State* const made = new State;
  return *made;
}

std::atomic<const char*>& latest() {
  static std::atomic<const char*> made{""};
  return made;
}

// A whole number of digits alone; -1 where `text` is none.
long number(const std::string& text) {
  const bool is_number = !text.empty() && text.size() < 10 &&
                         text.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::stol(text) : -1;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t stop = std::min(text.find(separator, start), text.size());
    parts.push_back(text.substr(start, stop - start));
    start = stop + 1;
  }
  return parts;
}

// "ncclAllReduce:3" or, with the result as a number, "ncclAllReduce:3:6".
bool parse(Effect effect, const std::string& text, Fault* fault) {
  const std::vector<std::string> parts = split(text, ':');
  if (parts.size() < 2 || parts.size() > 3) return false;
  std::size_t function = 0;
  while (function < std::size(kFunctions) && parts[0] != kFunctions[function].name) ++function;
  const long result =
      parts.size() == 3
          ? number(parts[2])
          : static_cast<long>(effect == Effect::kAsync ? ncclRemoteError : ncclInternalError);
  *fault = {effect, function, number(parts[1]), static_cast<ncclResult_t>(result)};
  return function < std::size(kFunctions) && fault->calls_left > 0 && result > ncclSuccess &&
         result < ncclNumResults;
}

// Replaces all faults of one effect by those of a list; their calls are counted from here.
bool set_faults(Effect effect, const std::string& list) {
  std::vector<Fault> found;
  if (!list.empty()) {
    for (const std::string& text : split(list, ',')) {
      found.emplace_back();
      if (!parse(effect, text, &found.back())) return false;
    }
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  std::vector<Fault>& faults = state().faults;
  faults.erase(std::remove_if(faults.begin(), faults.end(),
                              [effect](const Fault& fault) { return fault.effect == effect; }),
               faults.end());
  faults.insert(faults.end(), found.begin(), found.end());
  return true;
}

bool set_choice(std::atomic<bool>* choice, const std::string& value, const char* no,
                const char* yes) {
  if (value != no && value != yes) return false;
  *choice = value == yes;
  return true;
}

bool apply(Settings* changed, const std::string& name, const std::string& value) {
  if (name == "FAKE_NCCL_FAIL") return set_faults(Effect::kFail, value);
  if (name == "FAKE_NCCL_STALL") return set_faults(Effect::kStall, value);
  if (name == "FAKE_NCCL_ASYNC_ERROR") return set_faults(Effect::kAsync, value);
  if (name == "FAKE_NCCL_PEER_LOSS") {
    return set_choice(&changed->reports_lost_peers, value, "wait", "error");
  }
  if (name == "FAKE_NCCL_MISMATCH") {
    return set_choice(&changed->reports_mismatches, value, "wait", "error");
  }
  if (name == "FAKE_NCCL_SYMMETRIC") {
    return set_choice(&changed->has_symmetric_memory, value, "0", "1");
  }
  const long amount = number(value);
  if (amount < 0) return false;
  if (name == "FAKE_NCCL_VERSION") {
    changed->version = static_cast<int>(amount);
  } else if (name == "FAKE_NCCL_DELAY_MS") {
    changed->delay_ms = amount;
  } else if (name == "FAKE_NCCL_RING_BYTES") {
    // A power of two, so that positions that run on for ever fall into place by a mask.
    if (amount < 16 || (amount & (amount - 1)) != 0) return false;
    changed->ring_bytes = static_cast<std::size_t>(amount);
  } else {
    return false;
  }
  return true;
}

constexpr const char* kNames[] = {
    "FAKE_NCCL_FAIL",     "FAKE_NCCL_STALL",     "FAKE_NCCL_ASYNC_ERROR",
    "FAKE_NCCL_VERSION",  "FAKE_NCCL_PEER_LOSS", "FAKE_NCCL_MISMATCH",
    "FAKE_NCCL_DELAY_MS", "FAKE_NCCL_SYMMETRIC", "FAKE_NCCL_RING_BYTES",
};

Settings* from_environment() {
  auto* made = new Settings{{FAKE_NCCL_VERSION}, {1 << 16}, {0}, {false}, {false}, {true}};
  for (const char* name : kNames) {
    const char* value = std::getenv(name);
    if (value == nullptr || apply(made, name, value)) continue;
    // A fault that nobody can meet makes a test that proves nothing.
    std::fprintf(stderr, "fake NCCL: %s=%s is not understood\n", name, value);
    std::abort();
  }
  return made;
}

}  // namespace

Settings& settings() {
  static Settings* const made = from_environment();
  return *made;
}

bool set(const std::string& name, const std::string& value) {
  return apply(&settings(), name, value);
}

const char* name_of(Function function) {
  return kFunctions[static_cast<std::size_t>(function)].name;
}

Fate fate_of(Function function) {
  const auto index = static_cast<std::size_t>(function);
  Fate fate;
  const int version = settings().version;
  if (kFunctions[index].since > version) {
    fate.failure = failed(ncclInvalidUsage, std::string(kFunctions[index].name) + " came with " +
                                                version_text(kFunctions[index].since) +
                                                ", this double plays " + version_text(version));
    return fate;
  }
  bool fails = false;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (Fault& fault : state().faults) {
      if (fault.function != index || fault.calls_left == 0 || --fault.calls_left > 0) continue;
      if (fault.effect == Effect::kStall) fate.stalls = true;
      if (fault.effect == Effect::kAsync) fate.async_error = fault.result;
      if (fault.effect == Effect::kFail) fate.failure = fault.result;
      fails = fails || fault.effect == Effect::kFail;
    }
  }
  if (fails) failed(fate.failure, std::string(kFunctions[index].name) + ": injected failure");
  return fate;
}

ncclResult_t failed(ncclResult_t result, const std::string& text) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  latest() = state().texts.insert("fake NCCL: " + text).first->c_str();
  return result;
}

const char* last_error() { return latest(); }

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace fake_nccl
