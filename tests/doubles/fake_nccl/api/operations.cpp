#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "api/api.h"
#include "api/stream_handles.h"
#include "engine/collectives.h"
#include "engine/group.h"

namespace fake_nccl {
namespace {

bool needs_source(const Call& call, bool is_root) {
  const bool from_root =
      call.collective == Collective::kBroadcast || call.collective == Collective::kScatter;
  return call.count > 0 && (is_root || !from_root);
}

bool needs_target(const Call& call, bool is_root) {
  const bool to_root =
      call.collective == Collective::kReduce || call.collective == Collective::kGather;
  return call.count > 0 && (is_root || !to_root);
}

// Looks up an op that the user made, which becomes a sum with a factor.
ncclResult_t resolve_op(Function function, Communicator* communicator, Call* call) {
  if (call->op >= ncclSum && call->op < ncclNumOps) return ncclSuccess;
  const bool is_there = communicator->with_possessions([&](Possessions* possessions) {
    const auto found = possessions->factors.find(call->op);
    if (found == possessions->factors.end()) return false;
    call->factor = found->second;
    return true;
  });
  if (!is_there || call->factor->dtype != call->dtype) {
    return invalid(function, "op " + std::to_string(call->op) +
                                 (is_there ? " is of another dtype" : " does not exist"));
  }
  call->op = ncclSum;
  return ncclSuccess;
}

ncclResult_t check(Function function, const Communicator& communicator, const Call& call) {
  if (call.dtype < 0 || call.dtype >= ncclNumTypes) {
    return invalid(function, "dtype " + std::to_string(call.dtype));
  }
  if (call.root < 0 || call.root >= communicator.num_ranks()) {
    return invalid(function, "root " + std::to_string(call.root) + " of " +
                                 std::to_string(communicator.num_ranks()) + " ranks");
  }
  const std::size_t most = std::numeric_limits<std::size_t>::max() / 2 / size_of(call.dtype) /
                           static_cast<std::size_t>(communicator.num_ranks());
  if (call.count > most) return invalid(function, std::to_string(call.count) + " elements");
  const bool is_root = communicator.rank() == call.root;
  if ((needs_source(call, is_root) && call.source == nullptr) ||
      (needs_target(call, is_root) && call.target == nullptr)) {
    return invalid(function, "a buffer is null");
  }
  return ncclSuccess;
}

ncclResult_t apply_config(const ncclCollConfig_t* config, Issued* issued) {
  ncclCollConfig_t read = {};
  const ncclResult_t result =
      read_call_config(config, issued->communicator->config().values(), &read);
  if (config == nullptr || result != ncclSuccess) return result;
  issued->communicator->with_possessions(
      [&](Possessions* possessions) { possessions->call_config = read; });
  if (read.launchCompletionEvent == nullptr) return ncclSuccess;
  issued->launch_event = find_event(read.launchCompletionEvent);
  return issued->launch_event != nullptr
             ? ncclSuccess
             : failed(ncclInvalidArgument, "launchCompletionEvent is no event");
}

ncclResult_t run(Function function, Call call, ncclComm_t comm, cudaStream_t stream,
                 const ncclCollConfig_t* config) {
  const Fate fate = fate_of(function);
  if (fate.failure != ncclSuccess) return fate.failure;
  Issued issued;
  ncclResult_t result = find_place(function, comm, stream, &issued);
  if (result == ncclSuccess) result = check(function, *issued.communicator, call);
  if (result == ncclSuccess) result = resolve_op(function, issued.communicator.get(), &call);
  if (result == ncclSuccess) result = apply_config(config, &issued);
  if (result != ncclSuccess) return result;
  issued.task = plan(call, issued.communicator->rank(), issued.communicator->num_ranks());
  issued.task.fate = fate;
  issued.estimated_us = 10.0f + static_cast<float>(call.count * size_of(call.dtype)) / 1000.0f;
  return submit(std::move(issued));
}

ncclResult_t run_collective(Function function, const Call& call, ncclComm_t comm,
                            cudaStream_t stream, const ncclCollConfig_t* config = nullptr) {
  return note(run(function, call, comm, stream, config));
}

// A message of one direction. One without elements is a message too, and meets its other side.
ncclResult_t run_message(Function function, const void* bytes, std::size_t count,
                         ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  const Fate fate = fate_of(function);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  Issued issued;
  ncclResult_t result = find_place(function, comm, stream, &issued);
  if (result != ncclSuccess) return note(result);
  const Call call = {Collective::kMessage, bytes, const_cast<void*>(bytes), count, dtype};
  result = check(function, *issued.communicator, call);
  if (result != ncclSuccess) return note(result);
  if (peer < 0 || peer >= issued.communicator->num_ranks()) {
    return note(invalid(function, "peer " + std::to_string(peer) + " of " +
                                      std::to_string(issued.communicator->num_ranks()) + " ranks"));
  }
  const Message message = {peer,
                           {Collective::kMessage, static_cast<std::uint32_t>(dtype), 0, 0},
                           static_cast<char*>(call.target),
                           count * size_of(dtype)};
  const bool is_send = function == Function::ncclSend;
  (is_send ? issued.task.sends : issued.task.receives).push_back(message);
  issued.task.fate = fate;
  return note(submit(std::move(issued)));
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

// A collective without and with a configuration of the call: parameters in brackets, then the call.
#define COLLECTIVE(name, parameters, ...)                                                   \
  ncclResult_t name(UNWRAP parameters, ncclComm_t comm, cudaStream_t stream) {              \
    return run_collective(Function::name, Call{__VA_ARGS__}, comm, stream);                 \
  }                                                                                         \
  ncclResult_t name##Config(UNWRAP parameters, ncclComm_t comm, cudaStream_t stream,        \
                            const ncclCollConfig_t* config) {                               \
    return run_collective(Function::name##Config, Call{__VA_ARGS__}, comm, stream, config); \
  }
#define UNWRAP(...) __VA_ARGS__
#define BUFFERS const void *source, void *target, std::size_t count, ncclDataType_t dtype

COLLECTIVE(ncclAllReduce, (BUFFERS, ncclRedOp_t op), Collective::kAllReduce, source, target, count,
           dtype, op)
COLLECTIVE(ncclReduceScatter, (BUFFERS, ncclRedOp_t op), Collective::kReduceScatter, source, target,
           count, dtype, op)
COLLECTIVE(ncclReduce, (BUFFERS, ncclRedOp_t op, int root), Collective::kReduce, source, target,
           count, dtype, op, std::nullopt, root)
COLLECTIVE(ncclAllGather, (BUFFERS), Collective::kAllGather, source, target, count, dtype)
COLLECTIVE(ncclAlltoAll, (BUFFERS), Collective::kAlltoAll, source, target, count, dtype)
COLLECTIVE(ncclBroadcast, (BUFFERS, int root), Collective::kBroadcast, source, target, count, dtype,
           ncclSum, std::nullopt, root)
COLLECTIVE(ncclGather, (BUFFERS, int root), Collective::kGather, source, target, count, dtype,
           ncclSum, std::nullopt, root)
COLLECTIVE(ncclScatter, (BUFFERS, int root), Collective::kScatter, source, target, count, dtype,
           ncclSum, std::nullopt, root)

ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t dtype, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  const Call call = {Collective::kBroadcast, buffer, buffer, count, dtype, ncclSum,
                     std::nullopt,           root};
  return run_collective(Function::ncclBcast, call, comm, stream);
}

ncclResult_t ncclSend(const void* source, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return run_message(Function::ncclSend, source, count, dtype, peer, comm, stream);
}

ncclResult_t ncclRecv(void* target, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return run_message(Function::ncclRecv, target, count, dtype, peer, comm, stream);
}

ncclResult_t ncclGroupStart() {
  const ncclResult_t entered = enter(Function::ncclGroupStart);
  if (entered == ncclSuccess) start_group();
  return entered;
}

ncclResult_t ncclGroupEnd() {
  // A group that fails to end is over, too.
  const ncclResult_t entered = note(enter(Function::ncclGroupEnd));
  const ncclResult_t ended = end_group();
  return entered == ncclSuccess ? ended : entered;
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simulation) {
  const Function function = Function::ncclGroupSimulateEnd;
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return note(entered);
  if (simulation == nullptr || simulation->magic != kSimulationMagic) {
    return note(invalid(function, "ncclSimInfo_t is not initialised"));
  }
  return simulate_group(&simulation->estimatedTime);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  const Function function = Function::ncclRedOpCreatePreMulSum;
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return entered;
  ncclResult_t result;
  const auto found = find_ready(comm, &result);
  if (found == nullptr) return result;
  if (op == nullptr || scalar == nullptr || dtype < 0 || dtype >= ncclNumTypes) {
    return invalid(function, "a null pointer, or dtype " + std::to_string(dtype));
  }
  Factor factor = {dtype, nullptr, {}};
  if (residence == ncclScalarDevice) {
    factor.place = scalar;
  } else {
    std::memcpy(factor.value, scalar, size_of(dtype));
  }
  *op = found->with_possessions([&](Possessions* possessions) {
    possessions->factors[possessions->next_op] = factor;
    return static_cast<ncclRedOp_t>(possessions->next_op++);
  });
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const Function function = Function::ncclRedOpDestroy;
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return entered;
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  const bool is_there = found->with_possessions(
      [op](Possessions* possessions) { return possessions->factors.erase(op) == 1; });
  return is_there ? ncclSuccess : invalid(function, "op " + std::to_string(op) + " was not made");
}
