#include "flight/flight_recorder.h"

#include <sched.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/clock.h"

namespace tritondt {
namespace {

// A reader that meets a writer this often gives the record up: it is being overwritten.
constexpr int kMaxReads = 1000;

}  // namespace

FlightRecorder::FlightRecorder(std::int64_t rank, std::int64_t world_size, std::int64_t capacity)
    : rank_(rank),
      world_size_(world_size),
      capacity_(capacity),
      wall_offset_ns_(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC)),
      records_(capacity < 1 ? nullptr : new Record[static_cast<std::size_t>(capacity)]) {
  if (rank < 0 || rank >= world_size) {
    throw std::invalid_argument("a flight recorder was asked for with rank " +
                                std::to_string(rank) + " of " + std::to_string(world_size) +
                                "; ranks go from 0 to the world's size - 1");
  }
  if (capacity < 1) {
    throw std::invalid_argument("a flight recorder was asked for with a capacity of " +
                                std::to_string(capacity) + "; it must be 1 or more");
  }
}

// The right to write one record. Stores release and loads acquire, so a reader that sees a new
// value sees the odd version before it too.
class FlightRecorder::Writing {
 public:
  explicit Writing(Record* record) : record_(record) {
    version_ = record->version.load(std::memory_order_relaxed) & ~std::uint32_t{1};
    while (
        !record->version.compare_exchange_weak(version_, version_ + 1, std::memory_order_acq_rel)) {
      if (version_ & 1) sched_yield();
      version_ &= ~std::uint32_t{1};
    }
  }
  ~Writing() { record_->version.store(version_ + 2, std::memory_order_release); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  template <typename Value>
  static void set(std::atomic<Value>* field, Value value) {
    field->store(value, std::memory_order_release);
  }
  // Sets a time that has not been set so far.
  static void set_first(std::atomic<std::int64_t>* field, std::int64_t now_ns) {
    if (field->load(std::memory_order_relaxed) == 0) set(field, now_ns);
  }

 private:
  Record* record_;
  std::uint32_t version_;
};

std::int64_t FlightRecorder::begin(std::int32_t communicator, std::int64_t sequence,
                                   std::int32_t operation, std::uint64_t fingerprint,
                                   std::int32_t site) {
  const std::int64_t now = monotonic_ns();
  const std::int64_t number = num_records_.fetch_add(1, std::memory_order_acq_rel);
  Record& found = record(number);
  const Writing writing(&found);
  // A thread that slept since it took its number may find the place taken by a later operation.
  if (found.number.load(std::memory_order_relaxed) > number) return number;
  Writing::set(&found.number, number);
  Writing::set(&found.communicator, communicator);
  Writing::set(&found.sequence, sequence);
  Writing::set(&found.operation, operation);
  Writing::set(&found.fingerprint, fingerprint);
  Writing::set(&found.site, site);
  Writing::set(&found.state, static_cast<std::uint8_t>(FlightState::kIssued));
  Writing::set(&found.peer, -1);
  Writing::set(&found.error, -1);
  Writing::set(&found.issued_ns, now);
  Writing::set(&found.started_ns, std::int64_t{0});
  Writing::set(&found.ended_ns, std::int64_t{0});
  Writing::set(&found.sent_bytes, std::int64_t{0});
  Writing::set(&found.received_bytes, std::int64_t{0});
  for (auto& began_ns : found.step_ns) Writing::set(&began_ns, std::int64_t{0});
  return number;
}

// In the order of StepKind.
constexpr std::array<FlightState, kNumSteps> kStateOfStep = {
    FlightState::kPacking, FlightState::kExchanging, FlightState::kExchanging,
    FlightState::kExchanging, FlightState::kUnpacking};

void FlightRecorder::step(std::int64_t number, StepKind kind) {
  if (number < 0) return;
  Record& found = record(number);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  const std::int64_t now = monotonic_ns();
  if (log_.is_on()) log_.step(this, number, kind, now);
  const Writing writing(&found);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  const auto place = static_cast<std::size_t>(kind);
  Writing::set(&found.state, static_cast<std::uint8_t>(kStateOfStep[place]));
  Writing::set_first(&found.started_ns, now);
  Writing::set_first(&found.step_ns[place], now);
}

void FlightRecorder::leave(std::int64_t number) {
  state(number, FlightState::kExchanging, -1);
  if (log_.is_on()) log_.end(this, number, monotonic_ns());
}

void FlightRecorder::state(std::int64_t number, FlightState state, std::int32_t peer) {
  if (number < 0) return;
  Record& found = record(number);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  const Writing writing(&found);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  Writing::set(&found.state, static_cast<std::uint8_t>(state));
  if (peer != -1) {
    Writing::set(&found.peer, peer);
    constexpr auto kPlace = static_cast<std::size_t>(StepKind::kWait);
    Writing::set_first(&found.step_ns[kPlace], monotonic_ns());
  }
  if (state != FlightState::kIssued && found.started_ns.load(std::memory_order_relaxed) == 0) {
    Writing::set(&found.started_ns, monotonic_ns());
  }
}

void FlightRecorder::end(std::int64_t number, FlightState state, std::int32_t error,
                         std::int64_t sent_bytes, std::int64_t received_bytes) {
  if (number < 0) return;
  const std::int64_t now = monotonic_ns();
  if (log_.is_on()) log_.end(this, number, now);
  Record& found = record(number);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  const Writing writing(&found);
  if (found.number.load(std::memory_order_relaxed) != number) return;
  Writing::set(&found.state, static_cast<std::uint8_t>(state));
  Writing::set(&found.error, error);
  Writing::set(&found.sent_bytes, sent_bytes);
  Writing::set(&found.received_bytes, received_bytes);
  Writing::set(&found.ended_ns, now);
}

bool FlightRecorder::read(const Record& record, std::int64_t number, FlightEntry* entry) {
  const auto get = [](const auto& field) { return field.load(std::memory_order_acquire); };
  for (int i = 0; i < kMaxReads; ++i) {
    const std::uint32_t version = get(record.version);
    if (version & 1) {
      sched_yield();
      continue;
    }
    std::array<std::int64_t, kNumSteps> step_ns;
    for (std::size_t i = 0; i < kNumSteps; ++i) step_ns[i] = get(record.step_ns[i]);
    *entry = {step_ns,
              get(record.number),
              get(record.sequence),
              get(record.fingerprint),
              get(record.issued_ns),
              get(record.started_ns),
              get(record.ended_ns),
              get(record.sent_bytes),
              get(record.received_bytes),
              get(record.communicator),
              get(record.operation),
              get(record.site),
              get(record.error),
              get(record.peer),
              static_cast<FlightState>(get(record.state))};
    if (record.version.load(std::memory_order_relaxed) == version) return entry->number == number;
  }
  return false;
}

std::vector<FlightEntry> FlightRecorder::last(std::int64_t count) const {
  const std::int64_t end = num_records_.load(std::memory_order_acquire);
  const std::int64_t num = std::max<std::int64_t>(0, std::min({count, end, capacity_}));
  std::vector<FlightEntry> entries;
  entries.reserve(static_cast<std::size_t>(num));
  FlightEntry entry = {};
  for (std::int64_t number = end - num; number < end; ++number) {
    if (read(record(number), number, &entry)) entries.push_back(entry);
  }
  return entries;
}

double FlightRecorder::wall_seconds(std::int64_t monotonic_ns) const {
  return static_cast<double>(monotonic_ns + wall_offset_ns_) * 1e-9;
}

void FlightRecorder::dump(const std::string& path, std::string_view reason) const {
  write_atomically(path, to_json(reason));
}

}  // namespace tritondt
