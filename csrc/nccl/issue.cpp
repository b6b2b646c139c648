#include "nccl/issue.h"

#include <cstddef>
#include <stdexcept>

namespace tritondt::nccl {
namespace {

// The arguments of one call, as NCCL takes them.
struct Issue {
  const Api& api;
  ncclComm_t comm;
  const void* source;
  void* target;
  std::size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op;
  int peer;
  cudaStream_t stream;
  const ncclCollConfig_t* config;

  // A function, or the one of the same arguments with a configuration behind them.
  template <typename Plain, typename Configured, typename... Arguments>
  bool call(const Plain& plain, const Configured& configured, Arguments... arguments) const {
    if (config == nullptr) return api.call(plain, arguments..., comm, stream);
    return api.call(configured, arguments..., comm, stream, config);
  }
};

bool issue_messages(const Api& api, ncclComm_t comm, Place place, const Call& call,
                    cudaStream_t stream) {
  Group group(api);
  for (const Call& message : as_messages(call, place)) {
    issue(api, comm, place, message, stream, nullptr);
  }
  return group.end();
}

}  // namespace

Group::Group(const Api& api) : api_(api) { api_.call(api_.ncclGroupStart); }

// The exception on its way says what went wrong; the end of the group would only say it again.
Group::~Group() {
  if (is_open_) api_.ncclGroupEnd();
}

bool Group::end() {
  is_open_ = false;
  return api_.call(api_.ncclGroupEnd);
}

float Group::simulate_end() {
  api_.ncclGroupSimulateEnd.require();
  is_open_ = false;
  ncclSimInfo_t info;
  api_.call(api_.ncclGroupSimulateEnd, &info);
  return info.estimatedTime;
}

bool is_one_function(const Api& api, const Call& call) {
  switch (call.kind) {
    case CallKind::kAllToAll:
      return api.ncclAlltoAll.is_there();
    case CallKind::kGather:
      return api.ncclGather.is_there();
    case CallKind::kScatter:
      return api.ncclScatter.is_there();
    default:
      return true;
  }
}

void check_takes_configuration(const Api& api, const Call& call) {
  if (call.kind == CallKind::kSend || call.kind == CallKind::kRecv) {
    throw std::invalid_argument(
        "a configuration was given for a send or recv; NCCL takes one for its collectives only");
  }
  api.ncclAllReduceConfig.require();  // all of them came together
}

bool issue(const Api& api, ncclComm_t comm, Place place, const Call& call, cudaStream_t stream,
           const ncclCollConfig_t* config) {
  if (!is_one_function(api, call)) return issue_messages(api, comm, place, call, stream);
  const Issue x = {api,
                   comm,
                   reinterpret_cast<const void*>(call.source),
                   reinterpret_cast<void*>(call.target),
                   static_cast<std::size_t>(call.count),
                   call.dtype,
                   call.op,
                   static_cast<int>(call.peer),
                   stream,
                   config};
  switch (call.kind) {
    case CallKind::kAllGather:
      return x.call(api.ncclAllGather, api.ncclAllGatherConfig, x.source, x.target, x.count,
                    x.dtype);
    case CallKind::kReduceScatter:
      return x.call(api.ncclReduceScatter, api.ncclReduceScatterConfig, x.source, x.target, x.count,
                    x.dtype, x.op);
    case CallKind::kAllReduce:
      return x.call(api.ncclAllReduce, api.ncclAllReduceConfig, x.source, x.target, x.count,
                    x.dtype, x.op);
    case CallKind::kBroadcast:
      return x.call(api.ncclBroadcast, api.ncclBroadcastConfig, x.source, x.target, x.count,
                    x.dtype, x.peer);
    case CallKind::kReduce:
      return x.call(api.ncclReduce, api.ncclReduceConfig, x.source, x.target, x.count, x.dtype,
                    x.op, x.peer);
    case CallKind::kAllToAll:
      return x.call(api.ncclAlltoAll, api.ncclAlltoAllConfig, x.source, x.target, x.count, x.dtype);
    case CallKind::kGather:
      return x.call(api.ncclGather, api.ncclGatherConfig, x.source, x.target, x.count, x.dtype,
                    x.peer);
    case CallKind::kScatter:
      return x.call(api.ncclScatter, api.ncclScatterConfig, x.source, x.target, x.count, x.dtype,
                    x.peer);
    case CallKind::kSend:
      return api.call(api.ncclSend, x.source, x.count, x.dtype, x.peer, comm, stream);
    case CallKind::kRecv:
      return api.call(api.ncclRecv, x.target, x.count, x.dtype, x.peer, comm, stream);
  }
  throw std::logic_error("an operation without a function");
}

}  // namespace tritondt::nccl
