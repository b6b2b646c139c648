#include "flight/signal_requests.h"

#include <dlfcn.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace tritondt {
namespace {

// Never closed: a handler may be about to write to it.
std::atomic<int> requests_fd{-1};
std::atomic<pid_t> requests_process{0};
std::array<std::atomic<bool>, NSIG> requested = {};

extern "C" void note_request(int signum) {
  const int kept_errno = errno;
  if (getpid() != requests_process.load()) {
    // A forked child, which has no thread to serve the signal: it does what it would have done.
    signal(signum, SIG_DFL);
    raise(signum);
  } else {
    requested[static_cast<std::size_t>(signum)].store(true);
    const std::uint64_t one = 1;
    // A full counter is readable as well, so the thread wakes all the same.
    [[maybe_unused]] const ssize_t written = write(requests_fd.load(), &one, sizeof(one));
  }
  errno = kept_errno;
}

// LLVM, which comes within Triton's library, takes SIGUSR1 and others when it first compiles, from
// whoever has them. Its handler of SIGUSR1 calls a function that no program in Python can set.
bool is_of_llvm(const struct sigaction& action) {
  void* const handler = (action.sa_flags & SA_SIGINFO) != 0
                            ? reinterpret_cast<void*>(action.sa_sigaction)
                            : reinterpret_cast<void*>(action.sa_handler);
  Dl_info object = {};
  if (dladdr(handler, &object) == 0 || object.dli_fname == nullptr) return false;
  std::string_view name(object.dli_fname);
  name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0
  return name.rfind("libtriton", 0) == 0 || name.rfind("libLLVM", 0) == 0;
}

bool is_free(const struct sigaction& action) {
  const bool is_default = (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
  return is_default || is_of_llvm(action);
}

bool install(int signum) {
  struct sigaction action = {};
  action.sa_handler = note_request;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(signum, &action, nullptr) == 0;
}

}  // namespace

int signal_requests_fd() {
  static std::mutex making;
  const std::lock_guard<std::mutex> lock(making);
  if (requests_process.load() != getpid()) {  // the first call, or the first one since a fork
    const int made = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (made < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    requests_fd.store(made);
    requests_process.store(getpid());
  }
  return requests_fd.load();
}

bool note_signal(int signum, struct sigaction* before) {
  signal_requests_fd();
  if (signum < 1 || signum >= NSIG || sigaction(signum, nullptr, before) != 0 ||
      signum == SIGKILL || signum == SIGSTOP) {
    throw std::invalid_argument("signal " + std::to_string(signum) +
                                " was asked to write a flight recorder; it cannot be handled");
  }
  if (!is_free(*before)) return false;
  if (!install(signum)) throw std::system_error(errno, std::generic_category(), "sigaction");
  return true;
}

void keep_signal(int signum) {
  struct sigaction now = {};
  if (sigaction(signum, nullptr, &now) == 0 && is_of_llvm(now)) install(signum);
}

void forget_signal(int signum, const struct sigaction& before) {
  struct sigaction now = {};
  if (sigaction(signum, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0) return;
  if (now.sa_handler == note_request) sigaction(signum, &before, nullptr);
}

void clear_signal_requests() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t taken = read(signal_requests_fd(), &count, sizeof(count));
}

bool take_signal(int signum) { return requested[static_cast<std::size_t>(signum)].exchange(false); }

}  // namespace tritondt
