#include "engine/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "engine/communicator.h"
#include "settings/errors.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

constexpr std::size_t kPageBytes = 4096;

struct Allocation {
  int descriptor;
  std::size_t num_bytes;
  std::unique_ptr<SharedMapping> mapping;
};

struct Allocations {
  std::mutex mutex;
  std::map<const char*, Allocation> by_start;
  std::multiset<const char*> registered;
};

Allocations& allocations() {
  static Allocations* const made = new Allocations;
  return *made;
}

// What a rank tells the others of its memory.
struct Offer {
  ncclResult_t result;
  bool is_symmetric;
  pid_t process;
  std::uint64_t num_bytes;
  SharedPlace place;
};

Offer offer_of(const void* buffer, std::size_t num_bytes) {
  Offer offer = {ncclSuccess, settings().has_symmetric_memory, getpid(), num_bytes, {}};
  const auto place = find_shared(buffer, num_bytes);
  if (reinterpret_cast<std::uintptr_t>(buffer) % kPageBytes != 0) {
    offer.result = failed(ncclInvalidArgument, "a window must start at a multiple of 4096");
  } else if (!place.has_value()) {
    offer.result = failed(ncclInvalidUsage, "a window must lie in memory of ncclMemAlloc");
  } else {
    offer.place = *place;
  }
  return offer;
}

}  // namespace

void* allocate(std::size_t num_bytes) {
  const std::size_t whole =
      std::max<std::size_t>((num_bytes + kPageBytes - 1) / kPageBytes, 1) * kPageBytes;
  const int descriptor = make_shared_file(whole);
  try {
    auto mapping = std::make_unique<SharedMapping>(descriptor, whole);
    char* start = mapping->bytes();
    const std::lock_guard<std::mutex> lock(allocations().mutex);
    allocations().by_start[start] = {descriptor, whole, std::move(mapping)};
    return start;
  } catch (...) {
    close(descriptor);
    throw;
  }
}

bool release(void* pointer) {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  const auto found = allocations().by_start.find(static_cast<const char*>(pointer));
  if (found == allocations().by_start.end()) return false;
  close(found->second.descriptor);
  allocations().by_start.erase(found);
  return true;
}

bool is_registered(const void* pointer) {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  const auto found = allocations().by_start.find(static_cast<const char*>(pointer));
  if (found == allocations().by_start.end()) return false;
  const auto first = allocations().registered.lower_bound(found->first);
  return first != allocations().registered.end() && *first < found->first + found->second.num_bytes;
}

Registration::Registration(const void* buffer) : start_(static_cast<const char*>(buffer)) {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  allocations().registered.insert(start_);
}

Registration::~Registration() {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  allocations().registered.erase(allocations().registered.find(start_));
}

std::optional<SharedPlace> find_shared(const void* pointer, std::size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  const char* start = static_cast<const char*>(pointer);
  auto found = allocations().by_start.upper_bound(start);
  if (found == allocations().by_start.begin()) return std::nullopt;
  --found;
  const auto offset = static_cast<std::size_t>(start - found->first);
  const Allocation& allocation = found->second;
  if (offset > allocation.num_bytes || num_bytes > allocation.num_bytes - offset) {
    return std::nullopt;
  }
  return SharedPlace{allocation.descriptor, offset, allocation.num_bytes};
}

int num_allocations() {
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  return static_cast<int>(allocations().by_start.size());
}

void* Window::at(int rank, std::size_t offset, std::size_t num_bytes) const {
  if (rank < 0 || rank >= num_ranks()) return nullptr;
  const View& view = views_[static_cast<std::size_t>(rank)];
  if (offset > view.num_bytes || num_bytes > view.num_bytes - offset) return nullptr;
  return view.bytes + offset;
}

bool Window::holds(int rank, const void* bytes, std::size_t num_bytes) const {
  const char* start = static_cast<const char*>(at(rank, 0));
  const char* given = static_cast<const char*>(bytes);
  const std::less<const char*> lies_before;
  if (start == nullptr || lies_before(given, start)) return false;
  return at(rank, static_cast<std::size_t>(given - start), num_bytes) != nullptr;
}

ncclResult_t Window::make(Communicator* communicator, void* buffer, std::size_t num_bytes,
                          std::shared_ptr<Window>* made) {
  const std::vector<int> ranks = communicator->all_ranks();
  std::vector<Offer> offers;
  ncclResult_t result =
      communicator->agree(Channel::kControl, ranks, offer_of(buffer, num_bytes), &offers);
  if (result != ncclSuccess) return result;
  for (const Offer& offer : offers) {
    if (!offer.is_symmetric) return ncclSuccess;
  }
  for (const Offer& offer : offers) {
    if (offer.result != ncclSuccess) return offer.result;
  }
  auto window = std::make_shared<Window>();
  try {
    for (const int rank : ranks) {
      const Offer& offer = offers[static_cast<std::size_t>(rank)];
      if (rank == communicator->rank()) {
        window->own_rank_ = rank;
        window->views_.push_back({static_cast<char*>(buffer), num_bytes, nullptr});
        continue;
      }
      const Descriptor file(open_shared_file(offer.process, offer.place.descriptor));
      auto mapping = std::make_unique<SharedMapping>(file.number(), offer.place.file_bytes);
      char* start = mapping->bytes() + offer.place.offset;
      window->views_.push_back({start, offer.num_bytes, std::move(mapping)});
    }
  } catch (const std::system_error& error) {
    result = failed(ncclSystemError, std::string("registering a window: ") + error.what());
  }
  // Nobody gives memory back before all have opened it, and all fail where one does.
  std::vector<ncclResult_t> results;
  const ncclResult_t agreed = communicator->agree(Channel::kControl, ranks, result, &results);
  if (agreed != ncclSuccess) return agreed;
  for (const ncclResult_t each : results) {
    if (each != ncclSuccess) return each;
  }
  *made = std::move(window);
  return ncclSuccess;
}

}  // namespace fake_nccl
