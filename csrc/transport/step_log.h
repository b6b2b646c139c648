#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tritondt {

// What a rank does within an exchange; kExchange is all of it, as far as the host takes part.
enum class StepKind : std::uint8_t { kPack, kSend, kKeep, kWait, kUnpack, kExchange };
constexpr std::array<const char*, 6> kStepKinds = {"pack", "send",   "keep",
                                                   "wait", "unpack", "exchange"};
constexpr std::size_t kNumSteps = kStepKinds.size() - 1;  // without the exchange itself

// A step of exchange `exchange` of the log, by CLOCK_MONOTONIC, and the thread that ran it.
struct TimedStep {
  std::int64_t exchange;
  std::int64_t started_ns, ended_ns;
  std::uint64_t thread;
  StepKind kind;
};

// When the steps of a process's exchanges ran, kept while somebody listens.
//
// An exchange belongs to the thread that begins it, which notes its steps and its end. While nobody
// listens each call is one comparison. Any thread may call any method.
class StepLog {
 public:
  static StepLog& of_process();

  bool is_on() const { return num_listeners_.load(std::memory_order_relaxed) != 0; }

  // One listener more, who hears of at most `most` steps, or one less. What was kept goes with the
  // last one.
  void listen(std::size_t most);
  void leave();

  // The calling thread's exchange begins; its number, or -1 where nobody listens or there is no
  // room. `owner` and `entry` name it in `step` and `end`.
  std::int64_t begin(const void* owner, std::int64_t entry, std::int64_t now_ns);

  // The calling thread's exchange comes to its next step; nothing for another one than that.
  void step(const void* owner, std::int64_t entry, StepKind kind, std::int64_t now_ns);

  // A step within the calling thread's exchange that has run.
  void add(StepKind kind, std::int64_t started_ns, std::int64_t ended_ns);

  // The host is through with the calling thread's exchange; nothing for another one than that.
  void end(const void* owner, std::int64_t entry, std::int64_t now_ns);

  // The steps that are kept, from the one numbered `first` on.
  std::vector<TimedStep> steps(std::size_t first) const;
  std::size_t num_steps() const;
  // Steps for which there was no room.
  std::size_t num_dropped() const;

 private:
  void keep(const TimedStep& step);

  std::atomic<int> num_listeners_{0};
  mutable std::mutex held_;  // what follows
  std::vector<TimedStep> steps_;
  std::int64_t num_exchanges_ = 0, first_exchange_ = 0;  // so far; kept ones
  std::size_t most_ = 0, num_dropped_ = 0;
};

}  // namespace tritondt
