#include "engine/exchange.h"

#include <algorithm>
#include <cstring>

#include "settings/settings.h"

namespace fake_nccl {
namespace {

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "reduce", "all_gather",
                                    "all_to_all", "broadcast",      "gather", "scatter",
                                    "message",    "agreement"};
  const auto index = static_cast<std::size_t>(collective);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

std::string text_of(const Tag& tag, std::uint64_t num_bytes) {
  return std::string(name_of(tag.collective)) + " of " + std::to_string(num_bytes) +
         " bytes, dtype " + std::to_string(tag.dtype) + ", op " + std::to_string(tag.op) +
         ", root " + std::to_string(tag.root);
}

}  // namespace

// Messages of one direction with one peer.
struct Exchange::Lane {
  Lane(int with, Ring between) : peer(with), ring(between) {}
  bool is_through() const { return current == messages.size(); }
  void next() {
    ++current;
    num_bytes_done = 0;
  }

  // Moves on by `move(bytes, count)`, which says how much it took; true when all is through.
  template <typename Move>
  bool carry_header(const Move& move, bool* has_moved) {
    return carry(move, reinterpret_cast<char*>(&header), 0, sizeof header, has_moved);
  }
  template <typename Move>
  bool carry_bytes(const Move& move, bool* has_moved) {
    const Message& message = messages[current];
    return carry(move, message.bytes, sizeof header, message.num_bytes, has_moved);
  }
  template <typename Move>
  bool carry(const Move& move, char* bytes, std::size_t start, std::size_t count, bool* has_moved) {
    if (num_bytes_done >= start + count) return true;
    const std::size_t passed = num_bytes_done - start;
    const std::size_t taken = move(bytes + passed, count - passed);
    num_bytes_done += taken;
    *has_moved = *has_moved || taken > 0;
    return passed + taken == count;
  }

  int peer;
  Ring ring;
  std::vector<Message> messages;
  std::size_t current = 0;
  std::size_t num_bytes_done = 0;  // of the current one, its header's too
  Header header = {};
  bool is_stuck = false;
};

Exchange::Exchange(const Segment* segment, Channel channel, int rank, int num_ranks)
    : segment_(segment), rank_(rank) {
  for (int peer = 0; peer < num_ranks; ++peer) {
    outgoing_.emplace_back(peer, segment->ring(channel, rank, peer));
    incoming_.emplace_back(peer, segment->ring(channel, peer, rank));
  }
}

Exchange::~Exchange() = default;

void Exchange::send(const Message& message) {
  outgoing_[static_cast<std::size_t>(message.peer)].messages.push_back(message);
}

void Exchange::receive(const Message& message) {
  incoming_[static_cast<std::size_t>(message.peer)].messages.push_back(message);
}

Progress Exchange::advance() {
  bool is_done = true, has_moved = false;
  for (std::size_t peer = 0; peer < outgoing_.size(); ++peer) {
    const bool wrote = write(&outgoing_[peer]), took = read(&incoming_[peer]);
    if (wrote || took) segment_->slot(static_cast<int>(peer)).doorbell.ring();
    has_moved = has_moved || wrote || took;
    is_done = is_done && is_over(outgoing_[peer]) && incoming_[peer].is_through();
  }
  if (is_done) return Progress::kDone;
  return has_moved ? Progress::kMoved : Progress::kBlocked;
}

std::vector<int> Exchange::advance_and_await() {
  advance();
  std::vector<int> peers;
  for (std::size_t peer = 0; peer < outgoing_.size(); ++peer) {
    if (!is_over(outgoing_[peer]) || !incoming_[peer].is_through()) {
      peers.push_back(static_cast<int>(peer));
    }
  }
  return peers;
}

bool Exchange::is_over(const Lane& outgoing) {
  if (outgoing.messages.empty()) return true;
  return outgoing.is_through() && outgoing.ring.num_read() == outgoing.ring.num_written();
}

bool Exchange::write(Lane* lane) const {
  bool has_moved = false;
  const auto move = [&](char* bytes, std::size_t count) { return lane->ring.write(bytes, count); };
  for (; !lane->is_through(); lane->next()) {
    const Message& message = lane->messages[lane->current];
    lane->header = {message.tag, message.num_bytes};
    if (!lane->carry_header(move, &has_moved)) break;
    if (!lane->carry_bytes(move, &has_moved)) break;
  }
  return has_moved;
}

bool Exchange::read(Lane* lane) {
  bool has_moved = false;
  const auto move = [&](char* bytes, std::size_t count) { return lane->ring.read(bytes, count); };
  for (; !lane->is_through() && !lane->is_stuck; lane->next()) {
    const bool is_new = lane->num_bytes_done < sizeof(Header);
    if (!lane->carry_header(move, &has_moved)) break;
    if (is_new) compare(lane);
    if (lane->is_stuck || !lane->carry_bytes(move, &has_moved)) break;
  }
  return has_moved;
}

// Ranks that do different things wait for each other, as on a device; what is different is only
// told where that was asked for. There, two dtypes of one size are found out too.
void Exchange::compare(Lane* lane) {
  const Message& message = lane->messages[lane->current];
  const Tag &mine = message.tag, &theirs = lane->header.tag;
  const bool is_other =
      theirs.collective != mine.collective || lane->header.num_bytes != message.num_bytes;
  const bool is_read_otherwise =
      theirs.dtype != mine.dtype || theirs.op != mine.op || theirs.root != mine.root;
  if (!is_other && !(is_read_otherwise && settings().reports_mismatches)) return;
  lane->is_stuck = true;
  mismatch_ = "rank " + std::to_string(rank_) + " expects from rank " + std::to_string(lane->peer) +
              " " + text_of(mine, message.num_bytes) + ", which sends " +
              text_of(theirs, lane->header.num_bytes);
}

}  // namespace fake_nccl
