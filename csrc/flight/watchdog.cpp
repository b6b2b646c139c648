#include "flight/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cpu/clock.h"
#include "cpu/process.h"
#include "flight/signal_requests.h"

namespace tritondt {
namespace {

// How late a timeout that was shortened may be noticed, or a signal that was taken.
constexpr std::int64_t kMaxPauseMs = 500;
constexpr std::int64_t kNsPerMs = 1'000'000;

// A thread has nobody to throw to: that a file could not be written is said on stderr. Without a
// path there is no folder for it.
void write_or_say(const FlightRecorder& recorder, const std::string& path,
                  const std::string& json) {
  try {
    if (path.empty()) throw std::system_error(ENOENT, std::generic_category(), "no folder for it");
    write_atomically(path, json);
  } catch (const std::system_error& error) {
    const std::string text = "tritondt: rank " + std::to_string(recorder.rank()) +
                             " could not write its flight recorder: " + error.what() + "\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  }
}

}  // namespace

Watchdog::Watchdog() : process_(process_number()), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Watchdog::~Watchdog() {
  close();
  ::close(wake_);
}

bool Watchdog::is_forked() const { return process_number() != process_; }

// In a forked child the thread is missing and the lock may be held for ever.
void Watchdog::check_process() const {
  if (!is_forked()) return;
  throw std::runtime_error("this watchdog belongs to process " + std::to_string(process_) +
                           "; a forked process makes its own");
}

void Watchdog::check_open() const {
  if (is_closing_) throw std::runtime_error("this watchdog is closed");
}

void Watchdog::watch(const std::shared_ptr<TimedExchange>& group,
                     std::shared_ptr<FlightRecorder> recorder, std::string path) {
  check_process();
  const std::lock_guard<std::mutex> lock(guard_);
  check_open();
  start_thread();
  remove(group.get());
  watched_.push_back({group, std::move(recorder), std::move(path)});
  wake();
}

void Watchdog::unwatch(const TimedExchange* group) {
  if (is_forked()) return;
  const std::lock_guard<std::mutex> lock(guard_);
  remove(group);
}

// Those that are gone are dropped as well.
void Watchdog::remove(const TimedExchange* group) {
  const auto is_dropped = [group](const Watched& watched) {
    const std::shared_ptr<TimedExchange> found = watched.group.lock();
    return found == nullptr || found.get() == group;
  };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), is_dropped), watched_.end());
}

bool Watchdog::dump_on_signal(int signum, std::shared_ptr<FlightRecorder> recorder,
                              std::string path) {
  check_process();
  const std::lock_guard<std::mutex> lock(guard_);
  check_open();
  start_thread();
  struct sigaction before = {};
  if (!note_signal(signum, &before)) return false;
  signals_.push_back({signum, before, std::move(recorder), std::move(path)});
  return true;
}

void Watchdog::close() {
  if (is_forked()) return;
  {
    const std::lock_guard<std::mutex> lock(guard_);
    if (is_closing_) return;
    is_closing_ = true;
    for (const Signal& signal : signals_) forget_signal(signal.signum, signal.before);
    if (!is_running_) return;
    wake();
  }
  pthread_join(thread_, nullptr);
}

void Watchdog::start_thread() {
  if (is_running_) return;
  signal_requests_fd();  // what may throw does it here
  // Signals are for the threads of Python, which they have to interrupt.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(
      &thread_, nullptr,
      [](void* self) -> void* {
        static_cast<Watchdog*>(self)->run();
        return nullptr;
      },
      this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_create");
#if defined(__linux__)
  pthread_setname_np(thread_, "tritondt-dog");
#endif
  is_running_ = true;
}

void Watchdog::run() {
  const int requests = signal_requests_fd();
  while (true) {
    int pause_ms = -1;
    for (const Overdue& overdue : look(&pause_ms)) {
      // The state is taken before whoever waits is woken and changes it, and written after: a disk
      // that hangs keeps nobody waiting.
      std::string json;
      if (overdue.recorder != nullptr) json = overdue.recorder->to_json("timeout");
      if (!overdue.group->expire(overdue.started_ns)) continue;
      if (overdue.recorder != nullptr) write_or_say(*overdue.recorder, overdue.path, json);
    }
    pollfd polled[] = {{wake_, POLLIN, 0}, {requests, POLLIN, 0}};
    poll(polled, 2, pause_ms);
    if (polled[1].revents != 0) serve_signals();
    if (polled[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken = read(wake_, &count, sizeof(count));
    }
    const std::lock_guard<std::mutex> lock(guard_);
    if (is_closing_) return;
  }
}

// What has reached its timeout now, and how long until something else may: an exchange that starts
// meanwhile does not reach its own before a whole timeout has passed.
std::vector<Watchdog::Overdue> Watchdog::look(int* pause_ms) {
  std::vector<Overdue> overdue;
  const std::lock_guard<std::mutex> lock(guard_);
  if (!is_closing_) {  // they have been given back
    for (const Signal& signal : signals_) keep_signal(signal.signum);
  }
  std::int64_t pause = signals_.empty() ? -1 : kMaxPauseMs;
  const std::int64_t now = coarse_ns();
  for (const Watched& watched : watched_) {
    const std::shared_ptr<TimedExchange> group = watched.group.lock();
    if (group == nullptr) continue;
    const std::int64_t started = group->started_ns();
    const std::int64_t timeout = group->timeout_ns();
    std::int64_t left = timeout;
    if (started != 0 && now - started >= timeout) {
      overdue.push_back({group, started, watched.recorder, watched.path});
    } else if (started != 0) {
      left = timeout - std::max<std::int64_t>(now - started, 0);
    }
    const std::int64_t left_ms = std::min(kMaxPauseMs, left / kNsPerMs + 1);
    pause = pause < 0 ? left_ms : std::min(pause, left_ms);
  }
  *pause_ms = static_cast<int>(pause);
  return overdue;
}

void Watchdog::serve_signals() {
  clear_signal_requests();
  std::vector<Signal> signals;
  {
    const std::lock_guard<std::mutex> lock(guard_);
    signals = signals_;
  }
  for (const Signal& signal : signals) {
    if (!take_signal(signal.signum)) continue;
    write_or_say(*signal.recorder, signal.path, signal.recorder->to_json("signal"));
  }
}

void Watchdog::wake() const {
  const std::uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
}

}  // namespace tritondt
