#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "interface/nccl_abi.h"
#include "shared/ring.h"
#include "shared/shared_file.h"

namespace fake_nccl {

struct alignas(64) RankSlot {
  Doorbell doorbell;
  std::atomic<Process> process;  // nobody until the rank comes: who comes is known from then on
  std::atomic<bool> has_left;
  std::atomic<std::int32_t> lost;  // one more than the rank that this one lost, and goes no further

  bool is_awaited() const { return process.load().id == 0; }
  bool is_gone() const { return has_left || (!is_awaited() && !process.load().is_alive()); }
};
static_assert(std::atomic<Process>::is_always_lock_free, "who is killed leaves no lock");

// The rings that carry what users send, those by which communicators agree among themselves, and
// those by which who is left of a communicator agrees to shrink it: whatever was cut short before
// may still be in the others.
enum class Channel { kData, kControl, kShrink };

// Why a rank cannot join: another has left before all had come.
class GivenUp : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The memory that the ranks of one communicator share.
class Segment {
 public:
  // A segment that ranks may join. Its file stays open in this process until all have, or until one
  // of them has given up. Throws std::system_error.
  static ncclUniqueId make_id();
  static void close_files_that_are_over();
  // How many ranks have joined so far; throws std::runtime_error where the id is used up.
  static int num_joined(const ncclUniqueId& id);

  // Joins as one of `num_ranks`; throws GivenUp, or another std::runtime_error with the reason,
  // where that cannot be.
  Segment(const ncclUniqueId& id, int num_ranks, int rank);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  bool is_complete() const;  // all ranks have joined
  // Makes sure that not all ranks join; false where they have.
  bool give_up();
  // Tells the others that this rank does nothing more here.
  void leave();
  RankSlot& slot(int rank) const;
  Ring ring(Channel channel, int source, int target) const;
  // How many signals `target` was ever given by `source`.
  std::atomic<std::uint64_t>& signals(int source, int target) const;
  void ring_all() const;

 private:
  struct Header;
  struct Offsets;
  class OpenFiles;

  Offsets offsets() const;

  int num_ranks_;
  int rank_;
  std::size_t ring_bytes_ = 0;
  std::unique_ptr<SharedMapping> mapping_;
};

}  // namespace fake_nccl
