#include "transport/step_log.h"

#include <pthread.h>

#include <algorithm>

namespace tritondt {
namespace {

// The exchange of a thread and the step that it is at; there is none at -1.
struct Current {
  const void* owner = nullptr;
  std::int64_t entry = -1, exchange = -1, began_ns = 0;
  std::int64_t step_began_ns = 0;
  StepKind kind = StepKind::kExchange;  // of the step; none where it is the exchange itself

  bool is(const void* other, std::int64_t other_entry) const {
    return exchange >= 0 && owner == other && entry == other_entry;
  }
};

thread_local Current current;

// As Python's threading.get_ident has it.
std::uint64_t this_thread() { return static_cast<std::uint64_t>(pthread_self()); }

}  // namespace

StepLog& StepLog::of_process() {
  static auto* const log = new StepLog;  // threads may note steps while the process ends
  return *log;
}

void StepLog::listen(std::size_t most) {
  const std::lock_guard<std::mutex> held(held_);
  most_ = std::max(most_, most);
  num_listeners_.fetch_add(1);
}

void StepLog::leave() {
  const std::lock_guard<std::mutex> held(held_);
  if (num_listeners_.fetch_sub(1) > 1) return;
  steps_ = {};
  first_exchange_ = num_exchanges_;
  most_ = num_dropped_ = 0;
}

std::int64_t StepLog::begin(const void* owner, std::int64_t entry, std::int64_t now_ns) {
  current = {};
  const std::lock_guard<std::mutex> held(held_);
  if (!is_on()) return -1;
  if (steps_.size() >= most_) {
    ++num_dropped_;
    return -1;
  }
  current.owner = owner;
  current.entry = entry;
  current.exchange = num_exchanges_++;
  current.began_ns = now_ns;
  return current.exchange;
}

void StepLog::step(const void* owner, std::int64_t entry, StepKind kind, std::int64_t now_ns) {
  if (!is_on() || !current.is(owner, entry)) return;
  if (current.kind != StepKind::kExchange) add(current.kind, current.step_began_ns, now_ns);
  current.kind = kind;
  current.step_began_ns = now_ns;
}

void StepLog::add(StepKind kind, std::int64_t started_ns, std::int64_t ended_ns) {
  if (is_on() && current.exchange >= 0) {
    keep({current.exchange, started_ns, ended_ns, this_thread(), kind});
  }
}

void StepLog::end(const void* owner, std::int64_t entry, std::int64_t now_ns) {
  if (!current.is(owner, entry)) return;
  step(owner, entry, StepKind::kExchange, now_ns);
  add(StepKind::kExchange, current.began_ns, now_ns);
  current = {};
}

void StepLog::keep(const TimedStep& step) {
  const std::lock_guard<std::mutex> held(held_);
  // Of an exchange from before all listeners had left, there is nothing to tell.
  if (!is_on() || step.exchange < first_exchange_) return;
  if (steps_.size() < most_) {
    steps_.push_back(step);
  } else {
    ++num_dropped_;
  }
}

std::vector<TimedStep> StepLog::steps(std::size_t first) const {
  const std::lock_guard<std::mutex> held(held_);
  const std::size_t from = std::min(first, steps_.size());
  return {steps_.begin() + static_cast<std::ptrdiff_t>(from), steps_.end()};
}

std::size_t StepLog::num_steps() const {
  const std::lock_guard<std::mutex> held(held_);
  return steps_.size();
}

std::size_t StepLog::num_dropped() const {
  const std::lock_guard<std::mutex> held(held_);
  return num_dropped_;
}

}  // namespace tritondt
