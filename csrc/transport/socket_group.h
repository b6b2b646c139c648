#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "transport/message.h"

namespace tritondt {

// How an exchange of messages ended, and at which peer where it did not end well.
enum class Outcome { kDone, kPending, kClosed, kMismatch, kInterrupted, kExpired };

struct Ending {
  Outcome outcome;
  std::int64_t peer;
};

// Connected stream sockets to the peers of one rank, driven by the thread that calls: no thread of
// its own, one system call per message where the socket's buffer has room.
//
// A message travels as a header of its tag and length, then its bytes. Messages of one pair of
// ranks arrive in the order in which they were sent, so a header that is not the expected one means
// that the two ranks do different things. It is found on arrival, before a byte of the message
// reaches its target; the group cannot be used afterwards.
//
// One thread at a time calls `start` and `finish`; the other methods may be called from any thread.
class SocketGroup {
 public:
  // `sockets` are non-blocking descriptors, one per peer, -1 for this rank; they stay the caller's.
  explicit SocketGroup(std::vector<int> sockets);
  ~SocketGroup();
  SocketGroup(const SocketGroup&) = delete;
  SocketGroup& operator=(const SocketGroup&) = delete;

  // Begins an exchange, at most one message each way per peer, and sends what can be sent at once.
  void start(const std::vector<Message>& sends, const std::vector<Message>& receives,
             std::uint64_t tag);

  // Carries on until every message is out and in, or something is wrong. Comes back with kPending,
  // and a peer that it waits for, when a signal or a fifth of a second passed: call it again.
  Ending finish();

  // Makes the running `finish`, or the next one that has to wait, return kInterrupted.
  void interrupt();

  // Since when an exchange is under way, by `coarse_ns`; 0 where none is.
  std::int64_t started_ns() const;

  // How long an exchange may take before a watchdog calls `expire`; kNoTimeout at first.
  static constexpr std::int64_t kNoTimeout = std::numeric_limits<std::int64_t>::max();
  std::int64_t timeout_ns() const { return timeout_ns_.load(std::memory_order_relaxed); }
  void set_timeout_ns(std::int64_t timeout_ns) {
    timeout_ns_.store(timeout_ns, std::memory_order_relaxed);
  }

  // Ends the exchange that began at `started_ns`: its `finish`, and all that follow, return
  // kExpired. False, and nothing happens, where that exchange is over.
  bool expire(std::int64_t started_ns);

 private:
  // In `under_way_`, once an exchange has expired.
  static constexpr std::int64_t kExpiredMark = -1;

  struct Header {
    std::uint64_t tag;
    std::uint64_t num_bytes;
  };

  // One message under way; `done` counts the header's bytes too.
  struct Transit {
    Message message;
    Header header;
    std::size_t done;
    bool is_complete() const {
      return done == sizeof(Header) + static_cast<std::size_t>(message.num_bytes);
    }
  };

  Ending advance();
  void wake();
  Outcome send(Transit* transit) const;
  Outcome receive(Transit* transit);
  Ending pass(bool with_receives);
  Outcome wait();

  // A message of at most so many bytes comes with its header in one system call, and waits here for
  // the header to be seen: copying 8 kB on takes 0.2 us, a system call 0.4 us.
  static constexpr std::size_t kShortBytes = 16384;

  std::vector<int> sockets_;
  std::array<char, kShortBytes> short_;
  int wake_;
  // The start of the exchange that is under way, 0 or kExpiredMark. Expiry changes a start only, so
  // it meets the exchange that it was meant for, or none.
  std::atomic<std::int64_t> under_way_{0};
  std::atomic<std::int64_t> timeout_ns_{kNoTimeout};
  std::uint64_t tag_ = 0;
  std::vector<Transit> sends_;
  std::vector<Transit> receives_;
  std::vector<pollfd> watched_;
  Ending early_ = {Outcome::kDone, -1};
};

}  // namespace tritondt
