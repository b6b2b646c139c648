#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tritondt {

// Bytes that go to a peer, or come from it.
struct Letter {
  std::int64_t peer;
  std::uintptr_t address;
  std::int64_t num_bytes;
};

// How an exchange of letters ended, and at which peer where it did not end well.
enum class Outcome { kDone, kPending, kClosed, kMismatch, kInterrupted };

struct Ending {
  Outcome outcome;
  std::int64_t peer;
};

// Connected stream sockets to the peers of one rank, driven by the thread that calls: no thread of
// its own, one system call per letter where the socket's buffer has room.
//
// A letter travels as a header of its tag and length, then its bytes. Letters of one pair of ranks
// arrive in the order in which they were sent, so a header that is not the expected one means that
// the two ranks do different things. It is found on arrival; the group cannot be used afterwards.
class SocketGroup {
 public:
  // `sockets` are non-blocking descriptors, one per peer, -1 for this rank; they stay the caller's.
  explicit SocketGroup(std::vector<int> sockets);
  ~SocketGroup();
  SocketGroup(const SocketGroup&) = delete;
  SocketGroup& operator=(const SocketGroup&) = delete;

  // Begins an exchange, at most one letter each way per peer, and sends what can be sent at once.
  void start(const std::vector<Letter>& sends, const std::vector<Letter>& receives,
             std::uint64_t tag);

  // Carries on until every letter is out and in, or something is wrong. Comes back with kPending,
  // and a peer that it waits for, when a signal or a fifth of a second passed: call it again.
  Ending finish();

  // Makes the running `finish`, or the next one, return kInterrupted; from any thread.
  void interrupt();

 private:
  struct Header {
    std::uint64_t tag;
    std::uint64_t num_bytes;
  };

  // One letter under way; `done` counts the header's bytes too.
  struct Transit {
    Letter letter;
    Header header;
    std::size_t done;
    bool is_complete() const {
      return done == sizeof(Header) + static_cast<std::size_t>(letter.num_bytes);
    }
  };

  Outcome send(Transit* transit) const;
  Outcome receive(Transit* transit) const;
  Ending pass(bool with_receives);
  Outcome wait();

  std::vector<int> sockets_;
  int wake_;
  std::uint64_t tag_ = 0;
  std::vector<Transit> sends_;
  std::vector<Transit> receives_;
  std::vector<pollfd> watched_;
  Ending early_ = {Outcome::kDone, -1};
};

}  // namespace tritondt
