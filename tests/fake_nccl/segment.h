#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "nccl_abi.h"
#include "ring.h"
#include "shared_file.h"

namespace fake_nccl {

enum class Presence : std::int32_t { kAwaited = 0, kJoining, kThere, kLeft };

struct alignas(64) RankSlot {
  Doorbell doorbell;
  std::atomic<Presence> presence;
  Process process;
};

// The rings that carry what users send, and those by which communicators agree among themselves.
enum class Channel { kData, kControl };

// The memory that the ranks of one communicator share.
class Segment {
 public:
  // A segment that ranks may join. Its file stays open in this process until all have, or until one
  // of them has given up. Throws std::system_error.
  static ncclUniqueId make_id();
  static void close_files_that_are_over();
  // How many ranks have joined so far; throws std::runtime_error where the id is used up.
  static int num_joined(const ncclUniqueId& id);

  // Joins as one of `num_ranks`; throws std::runtime_error with the reason where that cannot be.
  Segment(const ncclUniqueId& id, int num_ranks, int rank);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  bool is_complete() const;  // all ranks have joined
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
