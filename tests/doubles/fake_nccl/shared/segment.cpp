#include "shared/segment.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "settings/faults.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

constexpr std::size_t kControlBytes = 1024;
constexpr std::size_t kNumChannels = 3;
constexpr char kMagic[8] = "fakeids";

// What a unique id says; the rest of its 128 bytes is zero.
struct Identity {
  char magic[8];
  pid_t process;
  int descriptor;
  std::uint64_t token;
};
static_assert(sizeof(Identity) <= sizeof(ncclUniqueId), "an identity fits a unique id");

// The file of a segment, which may be another's by now; throws std::runtime_error.
int open_segment(const ncclUniqueId& id) {
  Identity identity;
  std::memcpy(&identity, &id, sizeof identity);
  if (std::memcmp(identity.magic, kMagic, sizeof kMagic) != 0) {
    throw std::runtime_error("the unique id is not one of this double's");
  }
  const int file = open_shared_file(identity.process, identity.descriptor);
  std::uint64_t token = 0;
  if (pread(file, &token, sizeof token, 0) == sizeof token && token == identity.token) return file;
  close(file);
  throw std::runtime_error("the unique id is used up");
}

// Sets what nobody has set, and refuses what somebody has set otherwise.
template <typename Value>
void agree(std::atomic<Value>* shared, Value mine, const char* what) {
  Value found = 0;
  if (shared->compare_exchange_strong(found, mine) || found == mine) return;
  throw std::runtime_error("this rank says " + std::to_string(mine) + " " + what +
                           ", another said " + std::to_string(found));
}

}  // namespace

struct alignas(64) Segment::Header {
  std::uint64_t token;
  std::atomic<std::uint64_t> ring_bytes;  // 0 until the first rank joins
  std::atomic<std::int32_t> num_ranks;    // 0 until the first rank joins
  std::atomic<std::int32_t> num_joined;   // negative where a rank gave up before all had come

  bool is_complete() const { return num_ranks != 0 && num_joined == num_ranks; }
  bool is_given_up() const { return num_joined < 0; }

  // Either all ranks come or one gives up, never both: who sees all is not left alone.
  bool add_one() {
    std::int32_t count = num_joined;
    while (count >= 0 && !num_joined.compare_exchange_weak(count, count + 1)) {
    }
    return count >= 0;
  }
  bool give_up() {
    std::int32_t count = num_joined;
    while (count >= 0 && count != num_ranks && !num_joined.compare_exchange_weak(count, -1)) {
    }
    return count != num_ranks;
  }
};

struct Segment::Offsets {
  std::size_t slots, positions, control, shrink, data, signals, end;
};

// Files of ids that this process made, for ranks that have not opened them yet. Never destroyed.
class Segment::OpenFiles {
 public:
  static OpenFiles& all() {
    static OpenFiles* const made = new OpenFiles;
    return *made;
  }

  void add(int descriptor, std::unique_ptr<SharedMapping> mapping) {
    const std::lock_guard<std::mutex> lock(mutex_);
    files_.push_back({descriptor, std::move(mapping)});
  }

  void close_what_is_over() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<File> kept;
    for (File& file : files_) {
      const auto* header = reinterpret_cast<const Header*>(file.mapping->bytes());
      if (header->is_complete() || header->is_given_up()) {
        close(file.descriptor);
      } else {
        kept.push_back(std::move(file));
      }
    }
    files_ = std::move(kept);
  }

 private:
  struct File {
    int descriptor;
    std::unique_ptr<SharedMapping> mapping;
  };
  std::mutex mutex_;
  std::vector<File> files_;
};

void Segment::close_files_that_are_over() { OpenFiles::all().close_what_is_over(); }

ncclUniqueId Segment::make_id() {
  close_files_that_are_over();
  Identity identity = {};
  std::memcpy(identity.magic, kMagic, sizeof kMagic);
  identity.process = getpid();
  if (getrandom(&identity.token, sizeof identity.token, 0) != sizeof identity.token) {
    throw std::runtime_error("getrandom gave less than 8 bytes");
  }
  identity.descriptor = make_shared_file(sizeof(Header));
  auto mapping = std::make_unique<SharedMapping>(identity.descriptor, sizeof(Header));
  reinterpret_cast<Header*>(mapping->bytes())->token = identity.token;
  OpenFiles::all().add(identity.descriptor, std::move(mapping));
  ncclUniqueId id = {};
  std::memcpy(&id, &identity, sizeof identity);
  return id;
}

int Segment::num_joined(const ncclUniqueId& id) {
  const Descriptor file(open_segment(id));
  const SharedMapping mapping(file.number(), sizeof(Header));
  return std::max(reinterpret_cast<const Header*>(mapping.bytes())->num_joined.load(), 0);
}

Segment::Segment(const ncclUniqueId& id, int num_ranks, int rank)
    : num_ranks_(num_ranks), rank_(rank) {
  const Descriptor file(open_segment(id));
  {
    const SharedMapping first(file.number(), sizeof(Header));
    auto* header = reinterpret_cast<Header*>(first.bytes());
    agree(&header->num_ranks, num_ranks, "ranks");
    agree(&header->ring_bytes, std::uint64_t{settings().ring_bytes}, "bytes a ring");
    ring_bytes_ = header->ring_bytes;
  }
  grow_shared_file(file.number(), offsets().end);  // all ranks to the same size
  mapping_ = std::make_unique<SharedMapping>(file.number(), offsets().end);
  step();
  Process nobody = {};
  if (!slot(rank).process.compare_exchange_strong(nobody, Process::self())) {
    throw std::runtime_error("rank " + std::to_string(rank) + " has joined before");
  }
  step();
  if (!reinterpret_cast<Header*>(mapping_->bytes())->add_one()) {
    slot(rank).has_left = true;
    throw GivenUp("a rank has given this communicator up");
  }
  ring_all();
}

Segment::~Segment() { leave(); }

bool Segment::give_up() { return reinterpret_cast<Header*>(mapping_->bytes())->give_up(); }

void Segment::leave() {
  give_up();
  slot(rank_).has_left = true;
  ring_all();
  close_files_that_are_over();
}

bool Segment::is_complete() const {
  return reinterpret_cast<const Header*>(mapping_->bytes())->is_complete();
}

Segment::Offsets Segment::offsets() const {
  const auto count = static_cast<std::size_t>(num_ranks_);
  const std::size_t num_pairs = count * count;
  Offsets found = {};
  found.slots = sizeof(Header);
  found.positions = found.slots + count * sizeof(RankSlot);
  found.control = found.positions + kNumChannels * num_pairs * sizeof(RingPositions);
  found.shrink = found.control + num_pairs * kControlBytes;
  found.data = found.shrink + num_pairs * kControlBytes;
  found.signals = found.data + num_pairs * ring_bytes_;
  found.end = found.signals + num_pairs * sizeof(std::uint64_t);
  return found;
}

RankSlot& Segment::slot(int rank) const {
  return reinterpret_cast<RankSlot*>(mapping_->bytes() + offsets().slots)[rank];
}

Ring Segment::ring(Channel channel, int source, int target) const {
  const auto pair = static_cast<std::size_t>(source * num_ranks_ + target);
  const auto num_pairs = static_cast<std::size_t>(num_ranks_ * num_ranks_);
  const Offsets places = offsets();
  auto* positions = reinterpret_cast<RingPositions*>(mapping_->bytes() + places.positions) +
                    static_cast<std::size_t>(channel) * num_pairs;
  const std::size_t starts[kNumChannels] = {places.data, places.control, places.shrink};
  const std::size_t capacity = channel == Channel::kData ? ring_bytes_ : kControlBytes;
  char* bytes = mapping_->bytes() + starts[static_cast<std::size_t>(channel)];
  return {positions + pair, bytes + pair * capacity, capacity};
}

std::atomic<std::uint64_t>& Segment::signals(int source, int target) const {
  auto* all = reinterpret_cast<std::atomic<std::uint64_t>*>(mapping_->bytes() + offsets().signals);
  return all[source * num_ranks_ + target];
}

void Segment::ring_all() const {
  for (int rank = 0; rank < num_ranks_; ++rank) slot(rank).doorbell.ring();
}

}  // namespace fake_nccl
