#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tritondt {

// What lies at the start of a rank's arena: what it has for whom, and how far it has read, written
// by that rank alone, and two bells, which the others ring. Behind it are two slots of messages.
//
// A rank sleeps at its own bells only. It says how many rings it lacks, so that of several peers
// the last one wakes it, and with it nobody else.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> wanted;  // the count of rings that wakes its rank; 0 while it is awake
};

// A message for one peer in the slot of its exchange. `sequence` is written last.
struct alignas(64) Announcement {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> tag;
  std::atomic<std::uint64_t> offset;  // in the arena
  std::atomic<std::uint64_t> num_bytes;
};

// The last exchange of which this rank has read all messages, as it has of those before.
struct alignas(64) Progress {
  std::atomic<std::uint64_t> sequence;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(Bell::rings) == 4, "a futex has 4 bytes");

// A rank's board, wherever its arena is mapped.
class DirectBoard {
 public:
  DirectBoard() = default;
  DirectBoard(char* base, std::size_t num_ranks) : base_(base), num_ranks_(num_ranks) {}

  static std::size_t num_bytes(std::size_t num_ranks) {
    const std::size_t used = kFirstBytes + num_ranks * 2 * sizeof(Announcement);
    return (used + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  Bell& arrivals() const { return *reinterpret_cast<Bell*>(base_); }
  Bell& readings() const { return *reinterpret_cast<Bell*>(base_ + sizeof(Bell)); }
  Progress& read() const { return *reinterpret_cast<Progress*>(base_ + 2 * sizeof(Bell)); }
  Announcement& announcement(std::uint64_t sequence, std::size_t peer) const {
    auto* const first = reinterpret_cast<Announcement*>(base_ + kFirstBytes);
    return first[(sequence & 1) * num_ranks_ + peer];
  }

 private:
  static constexpr std::size_t kFirstBytes = 2 * sizeof(Bell) + sizeof(Progress);
  static constexpr std::size_t kPageBytes = 4096;

  char* base_ = nullptr;
  std::size_t num_ranks_ = 0;
};

}  // namespace tritondt
