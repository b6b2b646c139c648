// A recorder written by several threads while it is read and dumped, and a watchdog at work.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "check.h"
#include "flight/flight_recorder.h"
#include "flight/watchdog.h"
#include "groups.h"

namespace {

using tritondt::FlightEntry;
using tritondt::FlightRecorder;
using tritondt::FlightState;
using tritondt::Outcome;
using tritondt::Watchdog;

std::string folder() {
  static const std::string made = [] {
    char name[] = "/tmp/tritondt-sanitize-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    return std::string(name);
  }();
  return made;
}

std::string content(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool comes(const std::string& path) {
  for (int i = 0; i < 1000; ++i) {
    if (!content(path).empty()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

void write_records(FlightRecorder* recorder, int thread) {
  for (std::int64_t i = 0; i < 3000; ++i) {
    const std::int32_t label = recorder->texts().number("text " + std::to_string(i % 200));
    const std::int64_t number = recorder->begin(label, i, label, 3 * i, thread);
    recorder->state(number, FlightState::kExchanging, thread);
    recorder->end(number, FlightState::kDone, -1, i, 2 * i);
  }
}

void check_entry(const FlightEntry& entry) {
  CHECK(entry.fingerprint == 3 * static_cast<std::uint64_t>(entry.sequence));
  CHECK(entry.communicator == entry.operation);
  if (entry.state == FlightState::kDone) {
    CHECK(entry.sent_bytes == entry.sequence && entry.received_bytes == 2 * entry.sequence);
    CHECK(entry.peer == entry.site && entry.ended_ns >= entry.started_ns);
  }
}

}  // namespace

void check_recorder() {
  // A small ring, in which writers overtake each other.
  FlightRecorder recorder(1, 4, 16);
  std::vector<std::thread> threads;
  std::atomic<int> num_writing{3};
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&recorder, &num_writing, thread] {
      write_records(&recorder, thread);
      --num_writing;
    });
  }
  const std::string path = folder() + "/rank-1.json";
  while (num_writing > 0) {
    for (const FlightEntry& entry : recorder.last(16)) check_entry(entry);
    recorder.dump(path, "test");
    CHECK(content(path).find("\"reason\": \"test\"") != std::string::npos);
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(recorder.last(100).size() == 16);
  CHECK(recorder.last(100).back().number == 8999);
}

void check_watchdog() {
  const auto recorder = std::make_shared<FlightRecorder>(0, 3, 100);
  const auto label = recorder->texts().number("world \"w\"\n");
  recorder->begin(label, 1, label, 9, -1);
  const std::string expired = folder() + "/expired.json", signalled = folder() + "/signal.json";
  Watchdog watchdog;
  CHECK(watchdog.dump_on_signal(SIGUSR1, recorder, signalled));
  CHECK(!watchdog.dump_on_signal(SIGUSR1, recorder, signalled));
  for (int i = 0; i < 10; ++i) {
    Ranks ranks(3);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      ranks.group(rank)->set_timeout_ns(20'000'000);
      watchdog.watch(ranks.group(rank), rank == 0 ? recorder : nullptr, expired);
    }
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&ranks, rank] {
        std::vector<char> bytes(10);
        ranks.group(rank)->start({}, {message((rank + 1) % 3, &bytes)}, 1);
        CHECK(finish(ranks.group(rank).get()).outcome == Outcome::kExpired);
      });
    }
    for (std::thread& thread : threads) thread.join();
    watchdog.unwatch(ranks.group(i % 3).get());  // the others go while they are watched
  }
  CHECK(comes(expired) && content(expired).find("world \\\"w\\\"\\u000a") != std::string::npos);
  raise(SIGUSR1);
  CHECK(comes(signalled));
  watchdog.close();
  watchdog.close();
  for (const char* name : {"/expired.json", "/signal.json", "/rank-1.json", ""}) {
    CHECK(remove((folder() + name).c_str()) == 0);
  }
}
