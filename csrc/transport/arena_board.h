#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/bell.h"

namespace tritondt {

// Rounds are counted on over all exchanges, with room for so many in each.
constexpr std::uint64_t kMaxRounds = std::uint64_t{1} << 20;

inline std::uint64_t first_round_of(std::uint64_t exchange) { return exchange * kMaxRounds; }

// Which of two slots, and of two announcements to a peer, a round uses: the other one than the
// round before, and than an exchange of one round before.
inline std::size_t parity_of(std::uint64_t round) { return (round / kMaxRounds + round) & 1; }

// What lies at the start of a rank's arena: what it has for whom, and how far it has read, written
// by that rank alone, and two bells, which the others ring. Behind it are two slots of messages.

// A message for one peer in the slot of its round. `sequence` is written last; `before` is that of
// the message for this peer before, 0 for the first: a receiver that missed one finds out.
struct alignas(64) Announcement {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> before;
  std::atomic<std::uint64_t> tag;
  std::atomic<std::uint64_t> offset;  // in the arena
  std::atomic<std::uint64_t> num_bytes;
};

// The last round of which this rank has read all messages, as it has of those before.
struct alignas(64) Progress {
  std::atomic<std::uint64_t> sequence;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// A rank's board, wherever its arena is mapped.
class ArenaBoard {
 public:
  ArenaBoard() = default;
  ArenaBoard(char* base, std::size_t num_ranks) : base_(base), num_ranks_(num_ranks) {}

  static std::size_t num_bytes(std::size_t num_ranks) {
    const std::size_t used = kFirstBytes + num_ranks * 2 * sizeof(Announcement);
    return (used + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  Bell& arrivals() const { return *reinterpret_cast<Bell*>(base_); }
  Bell& readings() const { return *reinterpret_cast<Bell*>(base_ + sizeof(Bell)); }
  Progress& read() const { return *reinterpret_cast<Progress*>(base_ + 2 * sizeof(Bell)); }
  // `parity` 0 or 1: the round's, as its slot.
  Announcement& announcement(std::size_t parity, std::size_t peer) const {
    auto* const first = reinterpret_cast<Announcement*>(base_ + kFirstBytes);
    return first[parity * num_ranks_ + peer];
  }

 private:
  static constexpr std::size_t kFirstBytes = 2 * sizeof(Bell) + sizeof(Progress);
  static constexpr std::size_t kPageBytes = 4096;

  char* base_ = nullptr;
  std::size_t num_ranks_ = 0;
};

}  // namespace tritondt
