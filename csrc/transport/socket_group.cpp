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
    : sockets_(std::move(sockets)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      leftovers_(sockets_.size()) {
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

Outcome SocketGroup::send(Transit* transit) {
  if (!leftovers_[transit->message.peer].unsent.empty()) {
    const Outcome outcome = send_leftover(transit->message.peer);
    if (outcome != Outcome::kDone) return outcome == Outcome::kPending ? Outcome::kDone : outcome;
  }
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

Outcome SocketGroup::send_leftover(std::size_t peer) {
  Leftover& left = leftovers_[peer];
  while (left.num_sent < left.unsent.size()) {
    const ssize_t sent = ::send(sockets_[peer], left.unsent.data() + left.num_sent,
                                left.unsent.size() - left.num_sent, MSG_NOSIGNAL);
    if (sent < 0) return would_block() ? Outcome::kPending : Outcome::kClosed;
    left.num_sent += static_cast<std::size_t>(sent);
  }
  left.unsent = {};
  left.num_sent = 0;
  return Outcome::kDone;
}

// As recvmsg, of what has been put back first.
ssize_t SocketGroup::read(std::size_t peer, msghdr* message) {
  Leftover& left = leftovers_[peer];
  if (left.unread.empty()) return recvmsg(sockets_[peer], message, 0);
  std::size_t count = 0;
  for (std::size_t part = 0; part < message->msg_iovlen; ++part) {
    const iovec& to = message->msg_iov[part];
    const std::size_t taken = std::min(to.iov_len, left.unread.size() - left.num_read);
    if (taken != 0) std::memcpy(to.iov_base, left.unread.data() + left.num_read, taken);
    left.num_read += taken;
    count += taken;
  }
  if (left.num_read == left.unread.size()) {
    left.unread = {};
    left.num_read = 0;
  }
  return static_cast<ssize_t>(count);
}

// Reads what belongs to nobody; kPending where more of it is yet to come.
Outcome SocketGroup::drop(std::size_t peer) {
  Leftover& left = leftovers_[peer];
  while (left.num_dropped > 0) {
    iovec part = {short_.data(), std::min<std::size_t>(short_.size(), left.num_dropped)};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const ssize_t received = read(peer, &message);
    if (received == 0) return Outcome::kClosed;
    if (received < 0) return would_block() ? Outcome::kPending : Outcome::kClosed;
    left.num_dropped -= static_cast<std::uint64_t>(received);
  }
  return Outcome::kDone;
}

// Puts back what has been read of a message whose bytes, if any, are in `short_`.
void SocketGroup::put_back(const Transit& transit, bool with_header) {
  Leftover& left = leftovers_[transit.message.peer];
  const auto* const header = reinterpret_cast<const char*>(&transit.header);
  const std::size_t num_header = std::min(transit.done, sizeof(Header));
  std::vector<char> bytes;
  if (with_header) bytes.assign(header, header + num_header);
  bytes.insert(bytes.end(), short_.data(), short_.data() + (transit.done - num_header));
  bytes.insert(bytes.end(), left.unread.begin() + static_cast<std::ptrdiff_t>(left.num_read),
               left.unread.end());
  left.unread = std::move(bytes);
  left.num_read = 0;
}

bool SocketGroup::is_skipped(const Header& header) const {
  const std::uint64_t number = number_of(header.tag);
  return number < number_of(tag_) && number <= skipped_;
}

Outcome SocketGroup::receive(Transit* transit) {
  const auto num_bytes = static_cast<std::size_t>(transit->message.num_bytes);
  const auto target = reinterpret_cast<char*>(transit->message.address);
  const std::size_t with_header = num_bytes <= short_.size() ? num_bytes : 0;
  const auto peer = static_cast<std::size_t>(transit->message.peer);
  while (!transit->is_complete()) {
    if (leftovers_[peer].num_dropped > 0) {
      const Outcome outcome = drop(peer);
      if (outcome != Outcome::kDone) return outcome == Outcome::kPending ? Outcome::kDone : outcome;
    }
    const bool is_expected = transit->done >= sizeof(Header);  // as was seen when the header came
    iovec parts[2];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen =
        rest(&transit->header, sizeof(Header), is_expected ? target : short_.data(),
             is_expected ? num_bytes : with_header, transit->done, parts);
    const ssize_t received = read(peer, &message);
    if (received == 0) return Outcome::kClosed;
    if (received < 0) return would_block() ? Outcome::kDone : Outcome::kClosed;
    transit->done += static_cast<std::size_t>(received);
    if (is_expected || transit->done < sizeof(Header)) continue;
    if (is_skipped(transit->header)) {
      put_back(*transit, /*with_header=*/false);
      leftovers_[peer].num_dropped = transit->header.num_bytes;
      transit->done = 0;
      continue;
    }
    if (transit->header.tag != tag_ ||
        transit->header.num_bytes != static_cast<std::uint64_t>(transit->message.num_bytes)) {
      put_back(*transit, /*with_header=*/true);
      transit->done = 0;
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

void SocketGroup::skip(std::uint64_t number) {
  std::uint64_t num_wakes = 0;
  if (::read(wake_, &num_wakes, sizeof(num_wakes)) < 0 && !would_block()) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  skipped_ = std::max(skipped_, number);
  for (const Transit& transit : sends_) {
    // What no byte has gone of is nothing that its receiver could be in the middle of.
    if (transit.done == 0) continue;
    std::vector<char>& unsent = leftovers_[transit.message.peer].unsent;
    const auto* const header = reinterpret_cast<const char*>(&transit.header);
    const auto* const bytes = reinterpret_cast<const char*>(transit.message.address);
    const std::size_t num_header = std::min(transit.done, sizeof(Header));
    unsent.insert(unsent.end(), header + num_header, header + sizeof(Header));
    unsent.insert(unsent.end(), bytes + (transit.done - num_header),
                  bytes + transit.message.num_bytes);
  }
  for (const Transit& transit : receives_) {
    if (transit.done == 0) continue;
    if (transit.done < sizeof(Header)) {
      put_back(transit, /*with_header=*/true);
    } else {
      leftovers_[transit.message.peer].num_dropped +=
          sizeof(Header) + static_cast<std::uint64_t>(transit.message.num_bytes) - transit.done;
    }
  }
  sends_.clear();
  receives_.clear();
  early_ = {Outcome::kDone, -1};
}

void SocketGroup::wake() {
  const std::uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
}

}  // namespace tritondt
