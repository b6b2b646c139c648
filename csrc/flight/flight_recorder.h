#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flight/text_table.h"
#include "transport/step_log.h"

namespace tritondt {

// How far an operation has come; kDone and kFailed end it.
enum class FlightState : std::uint8_t {
  kIssued,
  kPacking,
  kExchanging,
  kUnpacking,
  kDone,
  kFailed
};
constexpr std::array<const char*, 6> kFlightStates = {"issued",    "packing", "exchanging",
                                                      "unpacking", "done",    "failed"};

// One operation. Times are CLOCK_MONOTONIC in ns, 0 where it has not come so far; texts are numbers
// in the recorder's table and peers are ranks, -1 for none.
struct FlightEntry {
  std::array<std::int64_t, kNumSteps> step_ns;  // when it first came to each
  std::int64_t number;
  std::int64_t sequence;
  std::uint64_t fingerprint;
  std::int64_t issued_ns;
  std::int64_t started_ns;
  std::int64_t ended_ns;
  std::int64_t sent_bytes;
  std::int64_t received_bytes;
  std::int32_t communicator;
  std::int32_t operation;
  std::int32_t site;
  std::int32_t error;
  std::int32_t peer;
  FlightState state;
};

// The last operations of one rank, in a ring that is allocated once.
//
// Any thread may write and any thread may read at any moment. A record is guarded by a version, odd
// while it is written: writers of one record wait for each other, readers read again, and a reader
// never holds anything that a forked process could find locked.
class FlightRecorder {
 public:
  // Throws std::invalid_argument for a rank outside the world and for a capacity below 1.
  FlightRecorder(std::int64_t rank, std::int64_t world_size, std::int64_t capacity);

  TextTable& texts() { return texts_; }
  const TextTable& texts() const { return texts_; }

  // Records an operation as issued now; the number names it in `state` and `end`.
  std::int64_t begin(std::int32_t communicator, std::int64_t sequence, std::int32_t operation,
                     std::uint64_t fingerprint, std::int32_t site);

  // How far operation `number` is and, unless `peer` is -1, for which rank it waits. Ignored where
  // a later operation has taken its place.
  void state(std::int64_t number, FlightState state, std::int32_t peer);

  // An exchange comes to its next step, and to the state that is of it; ignored like `state`.
  void step(std::int64_t number, StepKind kind);

  // The host is through with operation `number`, which a stream ends; ignored like `state`.
  void leave(std::int64_t number);

  // Ends operation `number`; ignored like `state`.
  void end(std::int64_t number, FlightState state, std::int32_t error, std::int64_t sent_bytes,
           std::int64_t received_bytes);

  // The last operations, at most `count`, the oldest first. One that is overwritten meanwhile is
  // left out.
  std::vector<FlightEntry> last(std::int64_t count) const;

  // Everything as one JSON object; `reason` says why it is written.
  std::string to_json(std::string_view reason) const;

  // Writes `to_json(reason)` to `path`, under another name first, so that nobody reads half of it.
  // Throws std::system_error.
  void dump(const std::string& path, std::string_view reason) const;

  std::int64_t rank() const { return rank_; }
  std::int64_t world_size() const { return world_size_; }
  std::int64_t capacity() const { return capacity_; }

  // Seconds since 1970 of a time of an entry.
  double wall_seconds(std::int64_t monotonic_ns) const;

 private:
  // A FlightEntry of atomics: reading while somebody writes is then no race, and costs nothing more
  // than plain memory on x86 and ARM.
  struct Record {
    std::atomic<std::uint32_t> version{0};
    std::atomic<std::uint8_t> state{0};
    std::atomic<std::int32_t> communicator{-1}, operation{-1}, site{-1}, error{-1}, peer{-1};
    std::atomic<std::int64_t> number{-1};
    std::atomic<std::int64_t> sequence{0}, issued_ns{0}, started_ns{0}, ended_ns{0};
    std::atomic<std::int64_t> sent_bytes{0}, received_bytes{0};
    std::atomic<std::uint64_t> fingerprint{0};
    std::array<std::atomic<std::int64_t>, kNumSteps> step_ns{};
  };
  class Writing;

  Record& record(std::int64_t number) const { return records_[number % capacity_]; }
  static bool read(const Record& record, std::int64_t number, FlightEntry* entry);

  const std::int64_t rank_, world_size_, capacity_;
  const std::int64_t wall_offset_ns_;
  TextTable texts_;
  StepLog& log_ = StepLog::of_process();
  const std::unique_ptr<Record[]> records_;
  std::atomic<std::int64_t> num_records_{0};
};

// Replaces the file at `path` by `content` in one step, never what is no file: a link, a FIFO, a
// device. Throws std::system_error.
void write_atomically(const std::string& path, std::string_view content);

}  // namespace tritondt
