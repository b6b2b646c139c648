#include "transport/socket_group.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tritondt {
namespace {

// How long `finish` keeps whoever called it from looking at signals that another thread received.
constexpr int kPatienceMs = 200;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// The rest of a header and of the bytes behind it, of which `done` are over.
std::size_t rest(void* header, std::size_t header_bytes, void* bytes, std::size_t num_bytes,
                 std::size_t done, iovec* parts) {
  std::size_t count = 0;
  if (done < header_bytes) {
    parts[count++] = {static_cast<char*>(header) + done, header_bytes - done};
    done = header_bytes;
  }
  const std::size_t passed = done - header_bytes;
  if (passed < num_bytes) parts[count++] = {static_cast<char*>(bytes) + passed, num_bytes - passed};
  return count;
}

}  // namespace

SocketGroup::SocketGroup(std::vector<int> sockets)
    : sockets_(std::move(sockets)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

SocketGroup::~SocketGroup() { close(wake_); }

void SocketGroup::connect(std::size_t peer, int socket) {
  if (peer >= sockets_.size()) {
    throw std::out_of_range("a connection to peer " + std::to_string(peer) + " of " +
                            std::to_string(sockets_.size()));
  }
  sockets_[peer] = socket;
}

void SocketGroup::check(const Message& message) const {
  const bool is_there =
      message.peer >= 0 && static_cast<std::size_t>(message.peer) < sockets_.size();
  if (is_there && message.num_bytes >= 0) return;
  throw std::invalid_argument("a message of " + std::to_string(message.num_bytes) +
                              " bytes with peer " + std::to_string(message.peer) +
                              "; allowed are 0 bytes or more, and peers from 0 to " +
                              std::to_string(sockets_.size()) + " - 1");
}

void SocketGroup::start(const std::vector<Message>& sends, const std::vector<Message>& receives,
                        std::uint64_t tag) {
  for (const Message& message : sends) check(message);
  for (const Message& message : receives) check(message);
  if (!begin_exchange()) {
    early_ = {Outcome::kExpired, -1};
    return;
  }
  tag_ = tag;
  sends_.clear();
  receives_.clear();
  for (const Message& message : sends) {
    sends_.push_back({message, {tag, static_cast<std::uint64_t>(message.num_bytes)}, 0});
  }
  for (const Message& message : receives) receives_.push_back({message, {0, 0}, 0});
  early_ = pass(/*with_receives=*/false);
}

Outcome SocketGroup::send(Transit* transit) const {
  while (!transit->is_complete()) {
    iovec parts[2];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen =
        rest(&transit->header, sizeof(Header), reinterpret_cast<void*>(transit->message.address),
             static_cast<std::size_t>(transit->message.num_bytes), transit->done, parts);
    const ssize_t sent = sendmsg(sockets_[transit->message.peer], &message, MSG_NOSIGNAL);
    if (sent < 0) return would_block() ? Outcome::kDone : Outcome::kClosed;
    transit->done += static_cast<std::size_t>(sent);
  }
  return Outcome::kDone;
}

Outcome SocketGroup::receive(Transit* transit) {
  const auto num_bytes = static_cast<std::size_t>(transit->message.num_bytes);
  const auto target = reinterpret_cast<char*>(transit->message.address);
  const std::size_t with_header = num_bytes <= short_.size() ? num_bytes : 0;
  while (!transit->is_complete()) {
    const bool is_expected = transit->done >= sizeof(Header);  // as was seen when the header came
    iovec parts[2];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen =
        rest(&transit->header, sizeof(Header), is_expected ? target : short_.data(),
             is_expected ? num_bytes : with_header, transit->done, parts);
    const ssize_t received = recvmsg(sockets_[transit->message.peer], &message, 0);
    if (received == 0) return Outcome::kClosed;
    if (received < 0) return would_block() ? Outcome::kDone : Outcome::kClosed;
    transit->done += static_cast<std::size_t>(received);
    if (is_expected || transit->done < sizeof(Header)) continue;
    if (transit->header.tag != tag_ ||
        transit->header.num_bytes != static_cast<std::uint64_t>(transit->message.num_bytes)) {
      return Outcome::kMismatch;
    }
    if (transit->done > sizeof(Header)) {
      std::memcpy(target, short_.data(), transit->done - sizeof(Header));
    }
  }
  return Outcome::kDone;
}

Ending SocketGroup::pass(bool with_receives) {
  const auto step = [](std::vector<Transit>* transits, const auto& move) -> Ending {
    for (Transit& transit : *transits) {
      const Outcome outcome = move(&transit);
      if (outcome != Outcome::kDone) return {outcome, transit.message.peer};
    }
    transits->erase(std::remove_if(transits->begin(), transits->end(),
                                   [](const Transit& transit) { return transit.is_complete(); }),
                    transits->end());
    return {Outcome::kDone, -1};
  };
  const Ending sent = step(&sends_, [this](Transit* transit) { return send(transit); });
  if (sent.outcome != Outcome::kDone || !with_receives) return sent;
  return step(&receives_, [this](Transit* transit) { return receive(transit); });
}

Outcome SocketGroup::wait() {
  watched_.assign(1, {wake_, POLLIN, 0});
  for (const Transit& transit : receives_) {
    watched_.push_back({sockets_[transit.message.peer], POLLIN, 0});
  }
  for (const Transit& transit : sends_) {
    watched_.push_back({sockets_[transit.message.peer], POLLOUT, 0});
  }
  const int ready = poll(watched_.data(), watched_.size(), kPatienceMs);
  if (ready < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "poll");
  if (ready <= 0) return Outcome::kPending;
  if (watched_[0].revents == 0) return Outcome::kDone;
  return has_expired() ? Outcome::kExpired : Outcome::kInterrupted;
}

Ending SocketGroup::finish() { return end_exchange(advance()); }

Ending SocketGroup::advance() {
  if (early_.outcome != Outcome::kDone) return early_;
  while (true) {
    const Ending ending = pass(/*with_receives=*/true);
    if (ending.outcome != Outcome::kDone) return ending;
    if (sends_.empty() && receives_.empty()) return ending;
    const std::int64_t peer = (receives_.empty() ? sends_ : receives_).front().message.peer;
    const Outcome outcome = wait();
    if (outcome != Outcome::kDone) return {outcome, peer};
  }
}

void SocketGroup::interrupt() { wake(); }

void SocketGroup::wake() {
  const std::uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
}

}  // namespace tritondt
