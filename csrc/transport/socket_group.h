#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/message.h"
#include "transport/timed_exchange.h"

namespace tritondt {

// Connected stream sockets to the peers of one rank, driven by the thread that calls: no thread of
// its own, one system call per message where the socket's buffer has room.
//
// A message travels as a header of its tag and length, then its bytes. Messages of one pair of
// ranks arrive in the order in which they were sent, so a header that is not the expected one means
// that the two ranks do different things. It is found on arrival, before a byte of the message
// reaches its target; the group cannot be used afterwards.
//
// One thread at a time calls `start` and `finish`; the other methods may be called from any thread.
class SocketGroup : public TimedExchange {
 public:
  // `sockets` are non-blocking descriptors, one per peer, -1 where there is none so far, and for
  // this rank; they stay the caller's.
  explicit SocketGroup(std::vector<int> sockets);
  ~SocketGroup() override;
  SocketGroup(const SocketGroup&) = delete;
  SocketGroup& operator=(const SocketGroup&) = delete;

  // The connection to a peer, before the first exchange with it; by the thread that exchanges.
  // Throws std::out_of_range.
  void connect(std::size_t peer, int socket);

  // Begins an exchange, at most one message each way per peer, and sends what can be sent at once.
  // Throws std::invalid_argument for a peer that there is not, and for less than 0 bytes.
  void start(const std::vector<Message>& sends, const std::vector<Message>& receives,
             std::uint64_t tag);

  // Carries on until every message is out and in, or something is wrong. Comes back with kPending,
  // and a peer that it waits for, when a signal or a fifth of a second passed: call it again.
  Ending finish();

  // Makes the running `finish`, or the next one that has to wait, return kInterrupted.
  void interrupt();

 private:
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

  void check(const Message& message) const;
  Ending advance();
  void wake() override;
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
  std::uint64_t tag_ = 0;
  std::vector<Transit> sends_;
  std::vector<Transit> receives_;
  std::vector<pollfd> watched_;
  Ending early_ = {Outcome::kDone, -1};
};

}  // namespace tritondt
