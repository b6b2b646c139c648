#include "transport/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

namespace tritondt {
namespace {

// How late a waiting rank notices that a peer has left, or that it is interrupted.
constexpr long kSliceNs = 20'000'000;

}  // namespace

bool sleep_at(Bell* bell, std::uint32_t seen, std::uint32_t lacking) {
  const timespec slice = {0, kSliceNs};
  const std::uint32_t wanted = seen + lacking;
  bell->wanted.store(wanted == 0 ? wanted - 1 : wanted);
  // Whoever rings counts first and then looks what is wanted: either this call sees the count, or
  // that one sees who sleeps.
  if (syscall(SYS_futex, &bell->rings, FUTEX_WAIT, seen, &slice, nullptr, 0) == 0) return true;
  // A signal is no ring: a timer's, more often than every slice, would hide that a peer has left.
  return errno != ETIMEDOUT && errno != EINTR;
}

void wake_at(Bell* bell) { syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

void ring(Bell* bell) {
  const std::uint32_t rings = bell->rings.fetch_add(1) + 1;
  std::uint32_t wanted = bell->wanted.load();
  if (wanted != 0 && static_cast<std::int32_t>(rings - wanted) >= 0 &&
      bell->wanted.compare_exchange_strong(wanted, 0)) {
    wake_at(bell);
  }
}

}  // namespace tritondt
