#include "shared/ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "settings/faults.h"

namespace fake_nccl {
namespace {

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
  static_assert(sizeof *word == sizeof(std::uint32_t), "a futex is four bytes");
  syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void Doorbell::ring() {
  step();
  rings_.fetch_add(1);
  if (num_waiting_.load() > 0) futex(&rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

void Doorbell::wait(std::uint32_t seen, int timeout_ms) {
  // A waiter that is killed stays counted, which costs whoever rings a system call and no more.
  num_waiting_.fetch_add(1);
  const timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  if (rings_.load() == seen) futex(&rings_, FUTEX_WAIT, seen, &timeout);
  num_waiting_.fetch_sub(1);
}

std::size_t Ring::write(const char* source, std::size_t num_bytes) {
  const std::uint64_t written = num_written();
  const std::size_t room = capacity_ - static_cast<std::size_t>(written - num_read());
  const std::size_t taken = std::min(room, num_bytes);
  const std::size_t place = static_cast<std::size_t>(written) & (capacity_ - 1);
  const std::size_t straight = std::min(taken, capacity_ - place);
  if (taken == 0) return 0;
  std::memcpy(bytes_ + place, source, straight);
  std::memcpy(bytes_, source + straight, taken - straight);
  step();
  positions_->written.store(written + taken, std::memory_order_release);
  return taken;
}

std::size_t Ring::num_readable() const {
  return static_cast<std::size_t>(positions_->written.load(std::memory_order_acquire) -
                                  positions_->read.load(std::memory_order_relaxed));
}

std::size_t Ring::read(char* target, std::size_t num_bytes) {
  const std::uint64_t read = positions_->read.load(std::memory_order_relaxed);
  const std::size_t taken = std::min(num_readable(), num_bytes);
  const std::size_t place = static_cast<std::size_t>(read) & (capacity_ - 1);
  const std::size_t straight = std::min(taken, capacity_ - place);
  if (taken == 0) return 0;
  std::memcpy(target, bytes_ + place, straight);
  std::memcpy(target + straight, bytes_, taken - straight);
  step();
  positions_->read.store(read + taken, std::memory_order_release);
  return taken;
}

}  // namespace fake_nccl
