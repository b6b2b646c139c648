#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tritondt {

// What lies at the start of a rank's arena, written by that rank alone but for `sleepers`: what it
// has for whom, and what it has read of whom. Behind it are two slots of messages.
//
// Whoever waits for something here sleeps on `bell`, which changes with everything else.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> sleepers;
};

// A message for one peer in the slot of its exchange. `sequence` is written last.
struct alignas(64) Announcement {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> tag;
  std::atomic<std::uint64_t> offset;  // in the arena
  std::atomic<std::uint64_t> num_bytes;
};

// The last exchange whose message of a peer has been read.
struct alignas(64) Receipt {
  std::atomic<std::uint64_t> sequence;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(Bell::word) == 4, "a futex has 4 bytes");

// A rank's board, wherever its arena is mapped.
class DirectBoard {
 public:
  DirectBoard() = default;
  DirectBoard(char* base, std::size_t num_ranks) : base_(base), num_ranks_(num_ranks) {}

  static std::size_t num_bytes(std::size_t num_ranks) {
    const std::size_t used =
        sizeof(Bell) + num_ranks * (2 * sizeof(Announcement) + sizeof(Receipt));
    return (used + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  Bell& bell() const { return *reinterpret_cast<Bell*>(base_); }
  Announcement& announcement(std::uint64_t sequence, std::size_t peer) const {
    auto* const first = reinterpret_cast<Announcement*>(base_ + sizeof(Bell));
    return first[(sequence & 1) * num_ranks_ + peer];
  }
  Receipt& receipt(std::size_t peer) const {
    auto* const first =
        reinterpret_cast<Receipt*>(base_ + sizeof(Bell) + 2 * num_ranks_ * sizeof(Announcement));
    return first[peer];
  }

 private:
  static constexpr std::size_t kPageBytes = 4096;

  char* base_ = nullptr;
  std::size_t num_ranks_ = 0;
};

}  // namespace tritondt
