#include "nccl/calls.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

namespace tritondt::nccl {
namespace {

// From this version on, NCCL makes messages of broadcasts that start together.
constexpr int kJoinedBroadcasts = 22900;

bool is_made_of_messages(CallKind kind) {
  switch (kind) {
    case CallKind::kAllToAll:
    case CallKind::kGather:
    case CallKind::kScatter:
    case CallKind::kSend:
    case CallKind::kRecv:
      return true;
    default:
      return false;
  }
}

constexpr std::int64_t itemsize(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  throw std::logic_error("a dtype without a size");
}

// Whether this rank reads the source, or writes the target, of a call.
bool reads(const Call& call, int rank) {
  if (call.kind == CallKind::kRecv) return false;
  const bool is_from_root = call.kind == CallKind::kBroadcast || call.kind == CallKind::kScatter;
  return !is_from_root || call.peer == rank;
}

bool writes(const Call& call, int rank) {
  if (call.kind == CallKind::kSend) return false;
  const bool is_to_root = call.kind == CallKind::kReduce || call.kind == CallKind::kGather;
  return !is_to_root || call.peer == rank;
}

void check_parts(const char* what, const Parts& parts, std::size_t expected) {
  if (parts.size() == expected) return;
  throw std::invalid_argument(std::to_string(parts.size()) + " " + what +
                              " were given; there must be " + std::to_string(expected));
}

// Messages of no elements are left out; a negative count stays, to be refused.
void add(std::vector<Call>* calls, const Call& call) {
  if (call.count != 0) calls->push_back(call);
}

Call send(Part part, ncclDataType_t dtype, std::int64_t peer) {
  return {CallKind::kSend, part.address, 0, part.count, dtype, ncclSum, peer};
}

Call recv(Part part, ncclDataType_t dtype, std::int64_t peer) {
  return {CallKind::kRecv, 0, part.address, part.count, dtype, ncclSum, peer};
}

// `num_parts` parts of equal length, end to end.
Parts equal_parts(std::uintptr_t address, const Call& call, int num_parts) {
  const std::int64_t num_bytes = call.count * itemsize(call.dtype);
  Parts parts;
  for (int i = 0; i < num_parts; ++i) {
    parts.push_back({address + static_cast<std::uintptr_t>(i * num_bytes), call.count});
  }
  return parts;
}

std::uintptr_t address_of(std::size_t tensor, const std::vector<std::uintptr_t>& addresses) {
  if (tensor < addresses.size()) return addresses[tensor];
  throw std::out_of_range("a call is of tensor " + std::to_string(tensor) +
                          ", but the number of addresses is " + std::to_string(addresses.size()));
}

}  // namespace

CallSlices::CallSlices(std::vector<CallSlice> slices) : slices_(std::move(slices)) {}

std::vector<Call> CallSlices::calls(const std::vector<std::uintptr_t>& addresses) const {
  std::vector<Call> calls;
  calls.reserve(slices_.size());
  for (const auto& [call, source_tensor, target_tensor] : slices_) {
    calls.push_back(call);
    calls.back().source += address_of(source_tensor, addresses);
    calls.back().target += address_of(target_tensor, addresses);
  }
  return calls;
}

void check_call(const Call& call, Place place) {
  if (call.count < 0) {
    throw std::invalid_argument("a count of " + std::to_string(call.count) +
                                " was given; it must be 0 or more");
  }
  if (call.peer < 0 || call.peer >= place.num_ranks) {
    throw std::invalid_argument("rank " + std::to_string(call.peer) +
                                " was named; this communicator has ranks 0 to " +
                                std::to_string(place.num_ranks - 1));
  }
  if (call.count == 0) return;
  if (reads(call, place.rank) && call.source == 0) {
    throw std::invalid_argument("the source is null; this rank reads it");
  }
  if (writes(call, place.rank) && call.target == 0) {
    throw std::invalid_argument("the target is null; this rank writes it");
  }
}

std::vector<Call> as_messages(const Call& call, Place place) {
  const bool is_root = call.peer == place.rank;
  switch (call.kind) {
    case CallKind::kAllToAll:
      return all_to_all_v(place, equal_parts(call.source, call, place.num_ranks),
                          equal_parts(call.target, call, place.num_ranks), call.dtype);
    case CallKind::kGather:
      return gather_v(place, {call.source, call.count},
                      equal_parts(call.target, call, is_root ? place.num_ranks : 0), call.dtype,
                      call.peer);
    case CallKind::kScatter:
      return scatter_v(place, equal_parts(call.source, call, is_root ? place.num_ranks : 0),
                       {call.target, call.count}, call.dtype, call.peer);
    default:
      throw std::logic_error("an operation that is not made of messages");
  }
}

std::vector<Call> estimated_calls(const std::vector<Call>& calls, int version) {
  const auto is_broadcast = [](const Call& call) { return call.kind == CallKind::kBroadcast; };
  const bool joins =
      version >= kJoinedBroadcasts && std::count_if(calls.begin(), calls.end(), is_broadcast) > 1;
  std::vector<Call> found;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(found), [&](const Call& call) {
    return !is_made_of_messages(call.kind) && !(joins && is_broadcast(call));
  });
  return found;
}

std::vector<Call> all_gather_v(Place place, std::uintptr_t source, const Parts& targets,
                               ncclDataType_t dtype) {
  check_parts("targets", targets, place.num_ranks);
  std::vector<Call> calls;
  for (int rank = 0; rank < place.num_ranks; ++rank) {
    const Part& part = targets[rank];
    // Others than the root have no source, but a pointer that NCCL may look at.
    const std::uintptr_t from = rank == place.rank ? source : part.address;
    add(&calls, {CallKind::kBroadcast, from, part.address, part.count, dtype, ncclSum, rank});
  }
  return calls;
}

std::vector<Call> reduce_scatter_v(Place place, const Parts& sources, std::uintptr_t target,
                                   ncclDataType_t dtype, ncclRedOp_t op) {
  check_parts("sources", sources, place.num_ranks);
  std::vector<Call> calls;
  for (int rank = 0; rank < place.num_ranks; ++rank) {
    const Part& part = sources[rank];
    const std::uintptr_t to = rank == place.rank ? target : 0;
    add(&calls, {CallKind::kReduce, part.address, to, part.count, dtype, op, rank});
  }
  return calls;
}

std::vector<Call> all_to_all_v(Place place, const Parts& sources, const Parts& targets,
                               ncclDataType_t dtype) {
  check_parts("sources", sources, place.num_ranks);
  check_parts("targets", targets, place.num_ranks);
  std::vector<Call> calls;
  for (int peer = 0; peer < place.num_ranks; ++peer) {
    add(&calls, send(sources[peer], dtype, peer));
    add(&calls, recv(targets[peer], dtype, peer));
  }
  return calls;
}

std::vector<Call> gather_v(Place place, Part source, const Parts& targets, ncclDataType_t dtype,
                           std::int64_t root) {
  const bool is_root = root == place.rank;
  check_parts("targets", targets, is_root ? place.num_ranks : 0);
  std::vector<Call> calls;
  add(&calls, send(source, dtype, root));
  for (std::size_t peer = 0; peer < targets.size(); ++peer) {
    add(&calls, recv(targets[peer], dtype, static_cast<std::int64_t>(peer)));
  }
  return calls;
}

std::vector<Call> scatter_v(Place place, const Parts& sources, Part target, ncclDataType_t dtype,
                            std::int64_t root) {
  const bool is_root = root == place.rank;
  check_parts("sources", sources, is_root ? place.num_ranks : 0);
  std::vector<Call> calls;
  for (std::size_t peer = 0; peer < sources.size(); ++peer) {
    add(&calls, send(sources[peer], dtype, static_cast<std::int64_t>(peer)));
  }
  add(&calls, recv(target, dtype, root));
  return calls;
}

std::vector<Call> exchange(const std::vector<Message>& sends,
                           const std::vector<Message>& receives) {
  std::vector<Call> calls;
  calls.reserve(sends.size() + receives.size());
  for (const Message& message : sends) {
    add(&calls, send({message.address, message.num_bytes}, ncclUint8, message.peer));
  }
  for (const Message& message : receives) {
    add(&calls, recv({message.address, message.num_bytes}, ncclUint8, message.peer));
  }
  return calls;
}

}  // namespace tritondt::nccl
