#include "transport/timed_exchange.h"

#include "cpu/clock.h"

namespace tritondt {

bool TimedExchange::begin_exchange() {
  std::int64_t before = under_way_.load(std::memory_order_relaxed);
  const std::int64_t now = coarse_ns();
  if (before == 0) {
    under_way_.store(now, std::memory_order_relaxed);  // nobody else writes over 0
  } else {                                             // the exchange before was given up
    while (before != kExpiredMark && !under_way_.compare_exchange_weak(before, now)) {
    }
  }
  return before != kExpiredMark;
}

Ending TimedExchange::end_exchange(Ending ending) {
  if (ending.outcome == Outcome::kPending) return ending;
  std::int64_t started = under_way_.load(std::memory_order_relaxed);
  while (started != kExpiredMark && !under_way_.compare_exchange_weak(started, 0)) {
  }
  // Expired though all messages are there: the watchdog has told others so, and it stays said.
  if (started == kExpiredMark) return {Outcome::kExpired, ending.peer};
  return ending;
}

std::int64_t TimedExchange::started_ns() const {
  const std::int64_t found = under_way_.load(std::memory_order_relaxed);
  return found == kExpiredMark ? 0 : found;
}

bool TimedExchange::expire(std::int64_t started_ns) {
  if (started_ns == 0 || !under_way_.compare_exchange_strong(started_ns, kExpiredMark)) {
    return false;
  }
  wake();
  return true;
}

}  // namespace tritondt
