#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

namespace tritondt {

// Where the threads of run_parts come from.
enum class TeamOrigin {
  kTorch,  // the OpenMP that torch's CPU operators run on
  kOwn,    // started for the call and joined
};

TeamOrigin team_origin();

// Calls work(data) on the caller and on up to num_members - 1 more threads; returns when all have.
// `work` must not throw.
//
// The threads are torch's own where torch is loaded. After an operator torch's threads spin for
// milliseconds, so that others would share their cores with them: with two threads on two cores a
// sum took 1.6 times as long and a cast 1.4 to 1.9 times (Zen 4). They are also there already:
// starting and joining a thread takes 30 us. A child of fork has none of its parent's threads,
// which OpenMP does not notice; there, and without torch, threads are started.
void run_on_team(std::int64_t num_members, void (*work)(void* data), void* data);

// Calls body(part) once for every part. When parts throw, the others are run nevertheless and the
// exception of the first part that threw is thrown.
template <typename Body>
void run_parts(std::int64_t num_parts, const Body& body) {
  struct Shared {
    const Body& body;
    std::atomic<std::int64_t> next{0};
    std::vector<std::exception_ptr> errors;
  };
  Shared shared{body, {}, std::vector<std::exception_ptr>(static_cast<std::size_t>(num_parts))};
  const auto work = [](void* data) noexcept {
    Shared& all = *static_cast<Shared*>(data);
    const auto num_parts = static_cast<std::int64_t>(all.errors.size());
    for (std::int64_t part; (part = all.next.fetch_add(1)) < num_parts;) {
      try {
        all.body(part);
      } catch (...) {
        all.errors[static_cast<std::size_t>(part)] = std::current_exception();
      }
    }
  };
  run_on_team(num_parts, work, &shared);
  for (const std::exception_ptr& error : shared.errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tritondt
