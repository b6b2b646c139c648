#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl/types.h"
#include "transport/message.h"

namespace tritondt::nccl {

enum class CallKind {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
};

// One operation of a communicator, as a value. `count` is NCCL's count of that operation; `peer` is
// the root, or the other rank of a send or recv. What an operation does not have is ignored.
struct Call {
  CallKind kind;
  std::uintptr_t source;
  std::uintptr_t target;
  std::int64_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  std::int64_t peer = 0;
};

// A call before it is known where tensors lie: its source and target are bytes from where tensors
// with these numbers begin.
struct CallSlice {
  Call call;
  std::size_t source_tensor;
  std::size_t target_tensor;
};

// The calls of an operation, for all times that it runs.
class CallSlices {
 public:
  explicit CallSlices(std::vector<CallSlice> slices);

  // Throws std::out_of_range where a tensor is not among those at `addresses`.
  std::vector<Call> calls(const std::vector<std::uintptr_t>& addresses) const;

 private:
  std::vector<CallSlice> slices_;
};

// A rank of a communicator.
struct Place {
  int rank;
  int num_ranks;
};

// Throws std::invalid_argument for what no rank can do: a peer that is not there, a negative count,
// a null address where this rank reads or writes.
void check_call(const Call& call, Place place);

// All-to-all, gather or scatter, as the sends and recvs of one group.
std::vector<Call> as_messages(const Call& call, Place place);

// The calls that NCCL of a version estimates in a simulated group: its collectives. What it makes
// of messages it keeps for the next group, whose own are then one behind.
std::vector<Call> estimated_calls(const std::vector<Call>& calls, int version);

// Some elements of a tensor, for operations whose parts differ from rank to rank.
struct Part {
  std::uintptr_t address;
  std::int64_t count;
};
using Parts = std::vector<Part>;

// The v-forms, as the calls of one group. Parts are one for each rank, by rank; those of no
// elements are left out, on both sides alike. Only the root knows all parts of a gather or scatter.
std::vector<Call> all_gather_v(Place place, std::uintptr_t source, const Parts& targets,
                               ncclDataType_t dtype);
std::vector<Call> reduce_scatter_v(Place place, const Parts& sources, std::uintptr_t target,
                                   ncclDataType_t dtype, ncclRedOp_t op);
std::vector<Call> all_to_all_v(Place place, const Parts& sources, const Parts& targets,
                               ncclDataType_t dtype);
std::vector<Call> gather_v(Place place, Part source, const Parts& targets, ncclDataType_t dtype,
                           std::int64_t root);
std::vector<Call> scatter_v(Place place, const Parts& sources, Part target, ncclDataType_t dtype,
                            std::int64_t root);

// Bytes to and from peers, as the calls of one group; messages of no bytes are left out.
std::vector<Call> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives);

}  // namespace tritondt::nccl
