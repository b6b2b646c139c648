#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fake_nccl {

// What lies in memory that processes share holds no lock and no pointer: a process that is killed
// at any point leaves nothing that another waits to be given. Zeroed memory is a valid start.

// Rung by others when they have done something that this rank may be waiting for.
class Doorbell {
 public:
  void ring();
  std::uint32_t rings() const { return rings_.load(); }
  // Returns when the bell has rung since it stood at `seen`, or after `timeout_ms`.
  void wait(std::uint32_t seen, int timeout_ms);

 private:
  std::atomic<std::uint32_t> rings_;
  std::atomic<std::uint32_t> num_waiting_;
};

// How much has ever gone in and out, each on a cache line of its own.
struct RingPositions {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
};

// A stream of bytes from one rank to another; one thread at a time at either end.
class Ring {
 public:
  // The capacity is a power of two.
  Ring(RingPositions* positions, char* bytes, std::size_t capacity)
      : positions_(positions), bytes_(bytes), capacity_(capacity) {}

  // As much of `num_bytes` as there is room for, or as is there.
  std::size_t write(const char* source, std::size_t num_bytes);
  std::size_t read(char* target, std::size_t num_bytes);

  std::size_t num_readable() const;
  std::uint64_t num_written() const { return positions_->written.load(std::memory_order_relaxed); }
  std::uint64_t num_read() const { return positions_->read.load(std::memory_order_acquire); }

 private:
  RingPositions* positions_;
  char* bytes_;
  std::size_t capacity_;
};

}  // namespace fake_nccl
