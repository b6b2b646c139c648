#include "transport/arena_group.h"

#include <poll.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "cpu/clock.h"
#include "transport/bell.h"

namespace tritondt {
namespace {

// How long `finish` keeps whoever called it from looking at signals that another thread received.
constexpr std::int64_t kPatienceNs = 200'000'000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ArenaGroup::ArenaGroup(std::size_t place, std::vector<std::shared_ptr<Arena>> arenas,
                       std::shared_ptr<SocketGroup> group, std::vector<int> sockets, int num_spins)
    : place_(place),
      arenas_(std::move(arenas)),
      group_(std::move(group)),
      sockets_(std::move(sockets)),
      num_spins_(num_spins),
      board_bytes_(ArenaBoard::num_bytes(arenas_.size())),
      slot_bytes_(arenas_.empty() || arenas_[0] == nullptr
                      ? 0
                      : slot_bytes(arenas_[0]->num_bytes(), arenas_.size())),
      last_sent_(arenas_.size(), 0),
      last_read_(arenas_.size(), 0),
      read_at_{last_read_, last_read_} {
  if (place_ >= arenas_.size() || sockets_.size() != arenas_.size()) {
    throw std::invalid_argument("a rank at place " + std::to_string(place_) + " was given " +
                                std::to_string(arenas_.size()) + " arenas and " +
                                std::to_string(sockets_.size()) + " sockets");
  }
  for (const std::shared_ptr<Arena>& arena : arenas_) {
    if (arena == nullptr || arena->base() == nullptr) {
      throw std::invalid_argument("an arena is none, or is released");
    }
    if (arena->num_bytes() != arenas_[0]->num_bytes() || slot_bytes_ == 0) {
      throw std::invalid_argument("arenas are of one length, and longer than " +
                                  std::to_string(board_bytes_) + " bytes; one has " +
                                  std::to_string(arena->num_bytes()));
    }
    boards_.emplace_back(arena->base(), arenas_.size());
  }
}

std::uint64_t ArenaGroup::slot_bytes(std::size_t arena_bytes, std::size_t num_ranks) {
  const std::size_t board_bytes = ArenaBoard::num_bytes(num_ranks);
  // Whole pages each.
  return arena_bytes <= board_bytes ? 0 : (arena_bytes - board_bytes) / 2 / 4096 * 4096;
}

Ending ArenaGroup::run(const ArenaProgram* program, Operands operands, std::uint64_t sequence,
                       std::uint64_t tag) {
  if (boards_.empty()) throw std::invalid_argument("the arenas are released");
  if (first_round_of(sequence) <= sequence_) {
    throw std::invalid_argument("exchange " + std::to_string(sequence) + " after exchange " +
                                std::to_string(sequence_ / kMaxRounds));
  }
  if (program->num_rounds() > kMaxRounds - 1) {
    throw std::invalid_argument("an exchange of " + std::to_string(program->num_rounds()) +
                                " rounds; it has at most " + std::to_string(kMaxRounds - 1));
  }
  if (step_ != Step::kDone) {
    throw std::invalid_argument("exchange " + std::to_string(sequence) +
                                " within another one, which is under way");
  }
  program->check(operands);
  program_ = program;
  operands_ = std::move(operands);
  operands_.targets.push_back(operands_.staging);
  sequence_ = first_round_of(sequence);
  tag_ = tag;
  round_ = 0;
  begin_round();
  if (!begin_exchange()) {
    step_ = Step::kDone;
    return {Outcome::kExpired, -1};
  }
  return finish();
}

// The messages of a round, checked before anything is written.
void ArenaGroup::begin_round() {
  sends_.clear();
  receives_.clear();
  step_ = Step::kDone;
  if (round_ == program_->num_rounds()) {
    return;
  }
  program_->list(round_, &sends_, &receives_);
  for (const SlotMessage& message : sends_) {
    if (message.peer >= arenas_.size() || message.num_bytes > slot_bytes_ ||
        message.offset > slot_bytes_ - message.num_bytes) {
      throw std::invalid_argument("a message of " + std::to_string(message.num_bytes) +
                                  " bytes at " + std::to_string(message.offset) + " for place " +
                                  std::to_string(message.peer) + " does not fit a slot of " +
                                  std::to_string(slot_bytes_) + " bytes");
    }
  }
  for (const SlotMessage& message : receives_) {
    if (message.peer >= arenas_.size()) {
      throw std::invalid_argument("a message of place " + std::to_string(message.peer) +
                                  " is expected; there are " + std::to_string(arenas_.size()));
    }
  }
  step_ = Step::kSlot;
}

template <typename Run>
auto ArenaGroup::timed(StepKind kind, const Run& run) {
  if (!log_.is_on()) return run();
  const std::int64_t started_ns = monotonic_ns();
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
    log_.add(kind, started_ns, monotonic_ns());
  } else {
    const auto result = run();
    log_.add(kind, started_ns, monotonic_ns());
    return result;
  }
}

void ArenaGroup::connect(std::size_t peer, int socket) {
  if (peer >= sockets_.size()) {
    throw std::out_of_range("a connection to place " + std::to_string(peer) + " of " +
                            std::to_string(sockets_.size()));
  }
  sockets_[peer] = socket;
}

Ending ArenaGroup::finish() {
  if (boards_.empty()) throw std::invalid_argument("the arenas are released");
  slice_end_ns_ = coarse_ns() + kPatienceNs;
  const Ending ending = end_exchange(advance());
  if (ending.outcome != Outcome::kPending) step_ = Step::kDone;
  return ending;
}

Ending ArenaGroup::advance() {
  while (step_ != Step::kDone) {
    Ending ending = {Outcome::kDone, -1};
    if (step_ == Step::kSlot) {
      ending = timed(StepKind::kWait, [&] { return await_slot(); });
      if (ending.outcome != Outcome::kDone) return ending;
      send();
      step_ = Step::kArrivals;
    } else {
      ending = timed(StepKind::kWait, [&] { return await_arrivals(); });
      if (ending.outcome != Outcome::kDone) return ending;
      end_round();
    }
  }
  return {Outcome::kDone, -1};
}

// Until nobody reads what lay in the slot before.
Ending ArenaGroup::await_slot() {
  const Readers& before = readers_[parity_of(sequence_)];
  return await(boards_[place_].readings(), [&] {
    pending_.clear();
    for (const std::size_t peer : before.peers) {
      if (boards_[peer].read().sequence.load() < before.sequence) pending_.push_back(peer);
    }
    return Ending{Outcome::kDone, -1};
  });
}

void ArenaGroup::send() {
  const std::size_t parity = parity_of(sequence_);
  const std::uint64_t slot = board_bytes_ + parity * slot_bytes_;
  const auto base = reinterpret_cast<std::uintptr_t>(arenas_[place_]->base());
  timed(StepKind::kPack, [&] { program_->pack(round_, operands_, base + slot); });
  Readers& readers = readers_[parity];
  readers.sequence = sequence_;
  readers.peers.clear();
  for (const SlotMessage& message : sends_) {
    Announcement& announcement = boards_[place_].announcement(parity, message.peer);
    announcement.tag.store(tag_, std::memory_order_relaxed);
    announcement.offset.store(slot + message.offset, std::memory_order_relaxed);
    announcement.num_bytes.store(message.num_bytes, std::memory_order_relaxed);
    announcement.before.store(last_sent_[message.peer], std::memory_order_relaxed);
    last_sent_[message.peer] = sequence_;
    announcement.sequence.store(sequence_, std::memory_order_release);
    ring(&boards_[message.peer].arrivals());
    readers.peers.push_back(message.peer);
  }
  timed(StepKind::kKeep, [&] { program_->keep(round_, operands_); });
}

Ending ArenaGroup::await_arrivals() {
  arrived_.assign(arenas_.size(), 0);
  int num_looks = 0;
  return await(boards_[place_].arrivals(), [&] {
    pending_.clear();
    // Not at every look while it spins: of many ranks that takes longer than the look itself.
    if (num_looks++ == 0 || num_looks > num_spins_) {
      const std::int64_t peer = unexpected();
      if (peer >= 0) return Ending{Outcome::kUnexpected, peer};
    }
    for (const SlotMessage& message : receives_) {
      if (arrived_[message.peer] != 0) continue;
      const Outcome outcome = look(message);
      if (outcome == Outcome::kPending) pending_.push_back(message.peer);
      if (outcome == Outcome::kMismatch || outcome == Outcome::kUnexpected) {
        return Ending{outcome, static_cast<std::int64_t>(message.peer)};
      }
    }
    return Ending{Outcome::kDone, -1};
  });
}

// Whether a message is there; its address is noted where it is the expected one.
Outcome ArenaGroup::look(const SlotMessage& message) {
  const ArenaBoard& board = boards_[message.peer];
  const std::size_t parity = parity_of(sequence_);
  const Announcement& found = board.announcement(parity, place_);
  std::uint64_t sequence = found.sequence.load(std::memory_order_acquire);
  if (sequence < sequence_ &&
      board.announcement(1 - parity, place_).sequence.load(std::memory_order_acquire) > sequence_) {
    // The peer is at a later round: it announced this one meanwhile, or never will.
    sequence = found.sequence.load(std::memory_order_acquire);
    if (sequence < sequence_) return Outcome::kMismatch;
  }
  if (sequence < sequence_) return Outcome::kPending;
  const std::uint64_t tag = found.tag.load(std::memory_order_relaxed);
  const std::uint64_t offset = found.offset.load(std::memory_order_relaxed);
  const std::uint64_t num_bytes = found.num_bytes.load(std::memory_order_relaxed);
  const std::uint64_t arena_bytes = arenas_[message.peer]->num_bytes();
  const std::uint64_t before = found.before.load(std::memory_order_relaxed);
  const bool is_new = read_at_[parity][message.peer] != sequence;  // else `finish` looks again
  if (is_new && before != last_read_[message.peer] && before > skipped_) {
    return Outcome::kUnexpected;
  }
  if (sequence != sequence_ || tag != tag_ || num_bytes != message.num_bytes ||
      offset < board_bytes_ || offset > arena_bytes || num_bytes > arena_bytes - offset ||
      offset % 64 != 0) {
    return Outcome::kMismatch;
  }
  arrived_[message.peer] = reinterpret_cast<std::uintptr_t>(arenas_[message.peer]->base()) + offset;
  last_read_[message.peer] = read_at_[parity][message.peer] = sequence;
  return Outcome::kDone;
}

// A peer that has sent this rank a message of this round, or of one before, that it did not expect;
// -1 where there is none. One that is overwritten by the next is found by what that says of it.
std::int64_t ArenaGroup::unexpected() const {
  for (std::size_t peer = 0; peer < boards_.size(); ++peer) {
    for (std::size_t parity = 0; parity < 2 && peer != place_; ++parity) {
      const std::uint64_t sequence =
          boards_[peer].announcement(parity, place_).sequence.load(std::memory_order_acquire);
      if (sequence <= skipped_ || sequence > sequence_ || sequence == read_at_[parity][peer]) {
        continue;
      }
      const auto is_from = [&](const SlotMessage& message) { return message.peer == peer; };
      if (sequence < sequence_ || std::none_of(receives_.begin(), receives_.end(), is_from)) {
        return static_cast<std::int64_t>(peer);
      }
    }
  }
  return -1;
}

void ArenaGroup::end_round() {
  timed(StepKind::kUnpack, [&] { program_->unpack(round_, operands_, arrived_); });
  boards_[place_].read().sequence.store(sequence_);
  for (const SlotMessage& message : receives_) ring(&boards_[message.peer].readings());
  ++round_;
  ++sequence_;
  begin_round();
}

void ArenaGroup::skip(std::uint64_t sequence) {
  if (boards_.empty()) return;
  is_interrupted_.store(false);
  step_ = Step::kDone;
  sequence_ = std::max(sequence_, first_round_of(sequence) + kMaxRounds - 1);
  skipped_ = sequence_;
  boards_[place_].read().sequence.store(sequence_);
  for (const ArenaBoard& board : boards_) ring(&board.readings());
}

// Until `look`, which lists in `pending_` for whom this rank waits, finds nobody, or says that
// something is wrong. Everybody who is waited for rings at `bell`, this rank's own.
template <typename Look>
Ending ArenaGroup::await(Bell& bell, const Look& look) {
  for (int i = 0; i < num_spins_; ++i) {
    const Ending ending = look();
    if (ending.outcome != Outcome::kDone || pending_.empty()) return ending;
    relax();
  }
  bool has_rung = true;
  Ending ending = {};
  while (true) {
    const std::uint32_t seen = bell.rings.load();
    ending = look();
    if (ending.outcome != Outcome::kDone || pending_.empty()) break;
    ending = why_stopped(has_rung);
    if (ending.outcome == Outcome::kClosed) {  // it may have come before it left
      const std::int64_t peer = ending.peer;
      ending = look();
      const bool is_pending = std::find(pending_.begin(), pending_.end(), peer) != pending_.end();
      if (ending.outcome == Outcome::kDone && is_pending) ending = {Outcome::kClosed, peer};
      if (ending.outcome != Outcome::kDone || pending_.empty()) break;
    } else if (ending.outcome != Outcome::kDone) {
      break;
    }
    has_rung = sleep_at(&bell, seen, static_cast<std::uint32_t>(pending_.size()));
  }
  bell.wanted.store(0);
  return ending;
}

// kDone where nothing is in the way of waiting on.
Ending ArenaGroup::why_stopped(bool has_rung) const {
  const auto first = static_cast<std::int64_t>(pending_.front());
  if (has_expired()) return {Outcome::kExpired, first};
  if (is_interrupted_.load()) return {Outcome::kInterrupted, first};
  if (!has_rung) {
    for (const std::size_t peer : pending_) {
      if (has_left(peer)) return {Outcome::kClosed, static_cast<std::int64_t>(peer)};
    }
  }
  if (coarse_ns() >= slice_end_ns_) return {Outcome::kPending, first};
  return {Outcome::kDone, -1};
}

bool ArenaGroup::has_left(std::size_t peer) const {
  pollfd polled = {sockets_[peer], POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0 && polled.revents != 0;
}

void ArenaGroup::interrupt() {
  is_interrupted_.store(true);
  wake();
}

void ArenaGroup::wake() {
  group_->interrupt();
  const std::lock_guard<std::mutex> held(releasing_);
  if (boards_.empty()) return;
  for (Bell* bell : {&boards_[place_].arrivals(), &boards_[place_].readings()}) {
    bell->rings.fetch_add(1);
    wake_at(bell);
  }
}

void ArenaGroup::release() {
  const std::lock_guard<std::mutex> held(releasing_);
  boards_.clear();
  for (const std::shared_ptr<Arena>& arena : arenas_) arena->unmap();
}

}  // namespace tritondt
