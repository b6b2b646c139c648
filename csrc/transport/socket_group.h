#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

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
// reaches its target; the group can be used afterwards only where the exchange is skipped.
//
// A tag has the number of its exchange above 31 bits of its own (`number_of`). What arrives of an
// exchange that was skipped is dropped; what has gone half of it goes to its end, from a copy.
//
// One thread at a time calls `start`, `finish` and `skip`; the other methods may be called from any
// thread.
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

  // Ends what is under way, forgets interruptions, and drops from now on what arrives of the
  // exchanges up to this number.
  void skip(std::uint64_t number);

  static std::uint64_t number_of(std::uint64_t tag) { return tag >> 31; }

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

  // What skipped exchanges have left of one connection.
  struct Leftover {
    std::vector<char> unsent;  // goes out before anything else, from `num_sent` on
    std::size_t num_sent = 0;
    std::vector<char> unread;  // has come, and has not been looked at, from `num_read` on
    std::size_t num_read = 0;
    std::uint64_t num_dropped = 0;  // bytes that are yet to come and belong to nobody
  };

  void check(const Message& message) const;
  Ending advance();
  void wake() override;
  Outcome send(Transit* transit);
  Outcome send_leftover(std::size_t peer);
  Outcome receive(Transit* transit);
  ssize_t read(std::size_t peer, msghdr* message);
  Outcome drop(std::size_t peer);
  void put_back(const Transit& transit, bool with_header);
  bool is_skipped(const Header& header) const;
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
  std::vector<Leftover> leftovers_;
  std::uint64_t skipped_ = 0;  // the last exchange that was skipped
  std::vector<pollfd> watched_;
  Ending early_ = {Outcome::kDone, -1};
};

}  // namespace tritondt
