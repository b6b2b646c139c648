#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "transport/socket_group.h"

// Ranks of one process, connected pairwise by socketpairs.
class Ranks {
 public:
  explicit Ranks(std::size_t count) : sockets_(count, std::vector<int>(count, -1)) {
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = i + 1; j < count; ++j) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
        sockets_[i][j] = pair[0];
        sockets_[j][i] = pair[1];
      }
    }
    for (const std::vector<int>& sockets : sockets_) {
      groups_.push_back(std::make_shared<tritondt::SocketGroup>(sockets));
    }
  }
  ~Ranks() {
    for (std::size_t rank = 0; rank < sockets_.size(); ++rank) leave(rank);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  const std::shared_ptr<tritondt::SocketGroup>& group(std::size_t rank) { return groups_[rank]; }

  const std::vector<int>& sockets(std::size_t rank) const { return sockets_[rank]; }

  // Closes all connections of a rank, as its end does.
  void leave(std::size_t rank) {
    for (int& descriptor : sockets_[rank]) {
      if (descriptor >= 0) close(descriptor);
      descriptor = -1;
    }
  }

 private:
  std::vector<std::vector<int>> sockets_;
  std::vector<std::shared_ptr<tritondt::SocketGroup>> groups_;
};

inline tritondt::Message message(std::size_t peer, std::vector<char>* bytes) {
  return {static_cast<std::int64_t>(peer), reinterpret_cast<std::uintptr_t>(bytes->data()),
          static_cast<std::int64_t>(bytes->size())};
}

inline tritondt::Ending finish(tritondt::SocketGroup* group) {
  while (true) {
    const tritondt::Ending ending = group->finish();
    if (ending.outcome != tritondt::Outcome::kPending) return ending;
  }
}
