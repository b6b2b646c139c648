#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/task.h"
#include "shared/segment.h"

namespace fake_nccl {

enum class Progress { kDone, kMoved, kBlocked };

// Messages of one rank, all under way together: to different peers side by side, with the same peer
// in order. A message is over when the other side has taken all of it, as the strictest NCCL may
// have it: nothing is lent room beyond its exchange.
class Exchange {
 public:
  Exchange(const Segment* segment, Channel channel, int rank, int num_ranks);
  ~Exchange();

  void send(const Message& message);
  void receive(const Message& message);

  // Carries on as far as that goes without waiting.
  Progress advance();
  // The same, and then the peers with whom something is not over.
  std::vector<int> advance_and_await();

  // What was found to differ from what a peer says, or nothing. Messages of that peer go no
  // further.
  const std::string& mismatch() const { return mismatch_; }

 private:
  // What goes before the bytes.
  struct Header {
    Tag tag;
    std::uint64_t num_bytes;
  };

  struct Lane;

  bool write(Lane* lane) const;
  bool read(Lane* lane);
  static bool is_over(const Lane& outgoing);
  void compare(Lane* lane);

  const Segment* segment_;
  int rank_;
  std::vector<Lane> outgoing_;
  std::vector<Lane> incoming_;
  std::string mismatch_;
};

}  // namespace fake_nccl
