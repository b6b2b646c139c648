#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace tritondt {

// How an exchange of messages ended, and at which peer where it did not end well: it closed its
// connection, sent something else, or sent something that nothing here expects.
enum class Outcome { kDone, kPending, kClosed, kMismatch, kUnexpected, kInterrupted, kExpired };

struct Ending {
  Outcome outcome;
  std::int64_t peer;
};

// One exchange at a time, which a watchdog may end when it takes too long.
//
// One thread at a time begins and ends exchanges; the public methods may be called from any thread.
class TimedExchange {
 public:
  virtual ~TimedExchange() = default;

  // Since when an exchange is under way, by `coarse_ns`; 0 where none is.
  std::int64_t started_ns() const;

  // How long an exchange may take before a watchdog calls `expire`; kNoTimeout at first.
  static constexpr std::int64_t kNoTimeout = std::numeric_limits<std::int64_t>::max();
  std::int64_t timeout_ns() const { return timeout_ns_.load(std::memory_order_relaxed); }
  void set_timeout_ns(std::int64_t timeout_ns) {
    timeout_ns_.store(timeout_ns, std::memory_order_relaxed);
  }

  // Ends the exchange that began at `started_ns`: it, and all that follow, end with kExpired.
  // False, and nothing happens, where that exchange is over.
  bool expire(std::int64_t started_ns);

 protected:
  // False where an exchange has expired: no other one begins.
  bool begin_exchange();
  // Ends the exchange, unless it is pending; returns how it ended.
  Ending end_exchange(Ending ending);
  bool has_expired() const { return under_way_.load() == kExpiredMark; }

  // Wakes the thread that waits in an exchange.
  virtual void wake() = 0;

 private:
  static constexpr std::int64_t kExpiredMark = -1;

  // The start of the exchange that is under way, 0 or kExpiredMark. Expiry changes a start only, so
  // it meets the exchange that it was meant for, or none.
  std::atomic<std::int64_t> under_way_{0};
  std::atomic<std::int64_t> timeout_ns_{kNoTimeout};
};

}  // namespace tritondt
