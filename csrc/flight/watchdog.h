#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "flight/flight_recorder.h"
#include "transport/timed_exchange.h"

namespace tritondt {

// Ends exchanges that take too long, and writes flight recorders, from one thread that never needs
// the GIL: it works while Python is stuck.
//
// The thread starts with the first thing to watch and is joined by `close`. Times are right to a
// tick of the kernel, up to 10 ms. It wakes when an exchange under way reaches its timeout, and at
// least twice a second while it watches groups or signals. After a fork the child has no such
// thread: what it does with its copy of a watchdog does nothing.
class Watchdog {
 public:
  Watchdog();
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Expires the exchanges of `group` that take longer than its timeout, and then writes `recorder`,
  // where there is one, to `path`; where that is empty it says so. The group is not kept alive;
  // watched again, it is watched anew. Throws std::runtime_error once closed, or in a forked child.
  void watch(const std::shared_ptr<TimedExchange>& group, std::shared_ptr<FlightRecorder> recorder,
             std::string path);
  void unwatch(const TimedExchange* group);

  // Writes `recorder` to `path` at every `signum` from now on, unless the process does something
  // else with the signal already: then false. LLVM's own handler does not count, before or after.
  // Throws like `watch`, and std::invalid_argument for what is no signal that can be handled.
  bool dump_on_signal(int signum, std::shared_ptr<FlightRecorder> recorder, std::string path);

  // Gives signals back and ends the thread, after what it is writing. Again, or in a forked child:
  // does nothing.
  void close();

 private:
  struct Watched {
    std::weak_ptr<TimedExchange> group;
    std::shared_ptr<FlightRecorder> recorder;
    std::string path;
  };
  struct Signal {
    int signum;
    struct sigaction before;
    std::shared_ptr<FlightRecorder> recorder;
    std::string path;
  };
  struct Overdue {
    std::shared_ptr<TimedExchange> group;
    std::int64_t started_ns;
    std::shared_ptr<FlightRecorder> recorder;
    std::string path;
  };

  bool is_forked() const;
  void check_process() const;
  // These are called with `guard_` held.
  void check_open() const;
  void remove(const TimedExchange* group);
  void start_thread();

  void run();
  std::vector<Overdue> look(int* pause_ms);
  void serve_signals();
  void wake() const;

  const pid_t process_;
  const int wake_;
  std::mutex guard_;  // of all below; the thread holds it for no longer than a look takes
  std::vector<Watched> watched_;
  std::vector<Signal> signals_;
  bool is_closing_ = false;
  bool is_running_ = false;
  pthread_t thread_ = {};
};

}  // namespace tritondt
