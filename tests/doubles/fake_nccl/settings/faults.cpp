#include "settings/faults.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <vector>

#include "settings/errors.h"
#include "settings/numbers.h"

namespace fake_nccl {
namespace {

struct Known {
  const char* name;
  int since;
};

constexpr Known kFunctions[] = {
#define FUNCTION(name, since) {#name, since},
#include "interface/functions.def"
#undef FUNCTION
};

// Strikes when `function` has been called `calls_left` more times, once.
struct Fault {
  Effect effect;
  std::size_t function;
  long calls_left;
  ncclResult_t result;
};

// Never destroyed: threads of streams outlive static objects.
struct Faults {
  std::mutex mutex;
  std::vector<Fault> faults;
};

Faults& struck() {
  static Faults* const made = new Faults;
  return *made;
}

std::atomic<std::int64_t>& steps_left() {
  static std::atomic<std::int64_t> left{0};
  return left;
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

}  // namespace

const char* name_of(Function function) {
  return kFunctions[static_cast<std::size_t>(function)].name;
}

int since(Function function) { return kFunctions[static_cast<std::size_t>(function)].since; }

bool set_faults(Effect effect, const std::string& list) {
  std::vector<Fault> found;
  if (!list.empty()) {
    for (const std::string& text : split(list, ',')) {
      found.emplace_back();
      if (!parse(effect, text, &found.back())) return false;
    }
  }
  const std::lock_guard<std::mutex> lock(struck().mutex);
  std::vector<Fault>& faults = struck().faults;
  faults.erase(std::remove_if(faults.begin(), faults.end(),
                              [effect](const Fault& fault) { return fault.effect == effect; }),
               faults.end());
  faults.insert(faults.end(), found.begin(), found.end());
  return true;
}

Fate strike(Function function) {
  Fate fate;
  {
    const std::lock_guard<std::mutex> lock(struck().mutex);
    for (Fault& fault : struck().faults) {
      const bool is_met = fault.function == static_cast<std::size_t>(function) &&
                          fault.calls_left > 0 && --fault.calls_left == 0;
      if (!is_met) continue;
      if (fault.effect == Effect::kStall) fate.stalls = true;
      if (fault.effect == Effect::kAsync) fate.async_error = fault.result;
      if (fault.effect == Effect::kFail) fate.failure = fault.result;
    }
  }
  if (fate.failure != ncclSuccess) {
    failed(fate.failure, std::string(name_of(function)) + ": injected failure");
  }
  return fate;
}

void die_at(std::int64_t number) { steps_left() = number; }

void step() {
  // Never counted down where nobody is to die, so that it costs a read.
  if (steps_left().load(std::memory_order_relaxed) == 0) return;
  if (steps_left().fetch_sub(1) == 1) std::raise(SIGKILL);
}

}  // namespace fake_nccl
