#include "settings/settings.h"

#include <cstdio>
#include <cstdlib>

#include "settings/errors.h"
#include "settings/numbers.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 23203
#endif

namespace fake_nccl {
namespace {

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
  } else if (name == "FAKE_NCCL_JOIN_MS") {
    changed->join_ms = amount;
  } else if (name == "FAKE_NCCL_LSA_RANKS") {
    changed->lsa_ranks = static_cast<int>(amount);
  } else if (name == "FAKE_NCCL_DIE") {
    die_at(amount);
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
    "FAKE_NCCL_FAIL",       "FAKE_NCCL_STALL",    "FAKE_NCCL_ASYNC_ERROR", "FAKE_NCCL_VERSION",
    "FAKE_NCCL_PEER_LOSS",  "FAKE_NCCL_MISMATCH", "FAKE_NCCL_DELAY_MS",    "FAKE_NCCL_SYMMETRIC",
    "FAKE_NCCL_RING_BYTES", "FAKE_NCCL_JOIN_MS",  "FAKE_NCCL_DIE",         "FAKE_NCCL_LSA_RANKS",
};

Settings* from_environment() {
  auto* made =
      new Settings{{FAKE_NCCL_VERSION}, {1 << 16}, {0}, {60'000}, {false}, {false}, {true}, {0}};
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

Fate fate_of(Function function) {
  const int version = settings().version;
  if (since(function) <= version) return strike(function);
  Fate fate;
  fate.failure = failed(ncclInvalidUsage, std::string(name_of(function)) + " came with " +
                                              version_text(since(function)) +
                                              ", this double plays " + version_text(version));
  return fate;
}

}  // namespace fake_nccl
