// A stand-in for libnccl.so.2 that moves nothing and needs no device: it writes every call down for
// a test to read, or nothing with RECORDING_NOTHING, so that what is timed over it is ours. It has
// the functions that NCCL has in RECORDING_VERSION.
#include "recording.h"

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = RECORDING_VERSION;
  return ncclSuccess;
}
// As NCCL's functions call each other: by a name that another library may have taken.
int recording_version_by_name() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "a remote process left" : "something went wrong";
}
const char* ncclGetLastError(ncclComm_t) { return "what NCCL said last"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  id->internal[0] = 7;
  return record("ncclGetUniqueId");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const ncclResult_t result = record("ncclCommInitRankConfig", num_ranks, id, rank, config);
  // NCCL leaves a communicator behind where it fails late; it is to be aborted.
  if (result == ncclUnhandledCudaError) return result;
  *comm = make(rank, num_ranks, is_blocking(config, nullptr));
  return result == ncclSuccess ? begin(*comm) : result;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return run("ncclCommFinalize", comm); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const ncclResult_t result = record("ncclCommDestroy", comm);
  comm->is_ended = true;
  return result;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->generation != generation) return ncclSuccess;  // what an earlier test left behind
  const ncclResult_t result = record("ncclCommAbort", comm);
  comm->is_ended = true;
  return result;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard<std::mutex> lock(guard);
  if (comm->is_ended) return ncclInvalidArgument;
  *state = comm->state;
  if (comm->state == ncclSuccess && comm->polls_left > 0) {
    --comm->polls_left;
    *state = ncclInProgress;
  } else if (comm->slot != nullptr) {
    __atomic_store_n(comm->slot, comm->child, __ATOMIC_RELEASE);
    comm->slot = nullptr;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->num_ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t, int* device) {
  *device = 5;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  const ncclResult_t result = record("ncclCommSplit", color, key, config, comm);
  if (result != ncclSuccess) return result;
  return give_child(comm, made, color < 0 ? nullptr : make(0, 1, is_blocking(config, comm)));
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  std::uint64_t bits = 0;
  if (residence == ncclScalarHostImmediate) std::memcpy(&bits, factor, sizeof(bits));
  *op = static_cast<ncclRedOp_t>(17);
  return record(
      "ncclRedOpCreatePreMulSum",
      residence == ncclScalarHostImmediate ? bits : reinterpret_cast<std::uint64_t>(factor), dtype,
      residence, comm);
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return record("ncclRedOpDestroy", op, comm);
}

ncclResult_t ncclGroupStart() {
  has_collective = false;
  return record("ncclGroupStart");
}
ncclResult_t ncclGroupEnd() {
  const ncclResult_t result = record("ncclGroupEnd");
  if constexpr (!kRecords) return result;
  const std::lock_guard<std::mutex> lock(guard);
  const bool is_nonblocking = !comms.empty() && !comms.back()->is_blocking;
  return result != ncclSuccess ? result : is_nonblocking ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t count,
                           ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclAllGather", comm, source, target, count, dtype, stream);
}
ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t count,
                               ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return run("ncclReduceScatter", comm, source, target, count, dtype, op, stream);
}
ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t count,
                           ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  has_collective = true;
  return run("ncclAllReduce", comm, source, target, count, dtype, op, stream);
}
ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t count,
                           ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclBroadcast", comm, source, target, count, dtype, root, stream);
}
ncclResult_t ncclReduce(const void* source, void* target, std::size_t count, ncclDataType_t dtype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclReduce", comm, source, target, count, dtype, op, root, stream);
}
ncclResult_t ncclSend(const void* source, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return run("ncclSend", comm, source, count, dtype, peer, stream);
}
ncclResult_t ncclRecv(void* target, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return run("ncclRecv", comm, target, count, dtype, peer, stream);
}

#if RECORDING_VERSION >= 21901
ncclResult_t ncclMemAlloc(void** address, std::size_t num_bytes) {
  *address = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  return record("ncclMemAlloc", num_bytes);
}
ncclResult_t ncclMemFree(void* address) { return record("ncclMemFree", address); }
ncclResult_t ncclCommRegister(ncclComm_t comm, void* address, std::size_t num_bytes,
                              void** handle) {
  *handle = reinterpret_cast<void*>(std::uintptr_t{77});
  return record("ncclCommRegister", address, num_bytes, comm);
}
ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  return record("ncclCommDeregister", handle, comm);
}
#endif

#if RECORDING_VERSION >= 22203
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (has_collective) info->estimatedTime = 12.5f;
  return record("ncclGroupSimulateEnd", info->size, info->magic);
}
#endif

#if RECORDING_VERSION >= 22304
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int num_ranks, int rank, int num_ids,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
  *comm = make(rank, num_ranks, is_blocking(config, nullptr));
  return record("ncclCommInitRankScalable", num_ranks, rank, num_ids, ids[num_ids - 1]);
}
#endif

#if RECORDING_VERSION >= 22703
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int num_excluded, ncclComm_t* made,
                            ncclConfig_t* config, int flags) {
  const ncclResult_t result =
      record("ncclCommShrink", excluded[0], num_excluded, flags, config, comm);
  if (result != ncclSuccess) return result;
  return give_child(comm, made, make(0, comm->num_ranks - num_excluded, is_blocking(config, comm)));
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* address, std::size_t num_bytes,
                                    ncclWindow_t* window, int flags) {
  *window = has_windows ? reinterpret_cast<ncclWindow_t>(std::uintptr_t{88}) : nullptr;
  return run("ncclCommWindowRegister", comm, address, num_bytes, flags);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return record("ncclCommWindowDeregister", reinterpret_cast<void*>(window), comm);
}
#endif

#if RECORDING_VERSION >= 22803
ncclResult_t ncclAlltoAll(const void* source, void* target, std::size_t count, ncclDataType_t dtype,
                          ncclComm_t comm, cudaStream_t stream) {
  return run("ncclAlltoAll", comm, source, target, count, dtype, stream);
}
ncclResult_t ncclGather(const void* source, void* target, std::size_t count, ncclDataType_t dtype,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclGather", comm, source, target, count, dtype, root, stream);
}
ncclResult_t ncclScatter(const void* source, void* target, std::size_t count, ncclDataType_t dtype,
                         int root, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclScatter", comm, source, target, count, dtype, root, stream);
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return run("ncclCommRevoke", comm, flags);
}
#endif

#if RECORDING_VERSION >= 22902
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  id->internal[0] = 8;
  return record("ncclCommGetUniqueId", comm);
}
ncclResult_t ncclCommGrow(ncclComm_t comm, int num_ranks, const ncclUniqueId* id, int rank,
                          ncclComm_t* made, ncclConfig_t* config) {
  const ncclResult_t result =
      record("ncclCommGrow", num_ranks, id == nullptr ? ncclUniqueId{} : *id, rank, config, comm);
  ncclComm* child = make(rank < 0 ? comm->rank : rank, num_ranks, is_blocking(config, comm));
  if (comm != nullptr) return give_child(comm, made, child);
  *made = child;
  return result == ncclSuccess ? begin(child) : result;
}
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, std::size_t offset, int peer,
                                      void** pointer) {
  // Rank 2 is of another host.
  *pointer = reinterpret_cast<void*>(peer == 2 ? 0 : 1000 * (std::uintptr_t(peer) + 1) + offset);
  return record("ncclGetPeerDevicePointer", reinterpret_cast<void*>(window), offset, peer);
}
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, std::size_t offset,
                                             void** pointer) {
  *pointer = reinterpret_cast<void*>(has_windows ? 9000 + offset : 0);
  return record("ncclGetLsaMultimemDevicePointer", reinterpret_cast<void*>(window), offset);
}
ncclResult_t ncclPutSignal(const void* source, std::size_t count, ncclDataType_t dtype, int peer,
                           ncclWindow_t window, std::size_t offset, int signal, int context,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclPutSignal", comm, source, count, dtype, peer, reinterpret_cast<void*>(window),
             offset, signal, context, flags, stream);
}
ncclResult_t ncclSignal(int peer, int signal, int context, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream) {
  return run("ncclSignal", comm, peer, signal, context, flags, stream);
}
ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t* expected, ncclComm_t comm,
                            cudaStream_t stream) {
  const ncclWaitSignalDesc_t& last = expected[count - 1];
  return run("ncclWaitSignal", comm, count, last.opCnt, last.peer, last.sigIdx, last.ctx, stream);
}
#endif

#if RECORDING_VERSION >= 23102
ncclResult_t ncclAllReduceConfig(const void* source, void* target, std::size_t count,
                                 ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t* config) {
  return run("ncclAllReduceConfig", comm, source, target, count, dtype, op, stream, config);
}
ncclResult_t ncclAlltoAllConfig(const void* source, void* target, std::size_t count,
                                ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream,
                                const ncclCollConfig_t* config) {
  return run("ncclAlltoAllConfig", comm, source, target, count, dtype, stream, config);
}
#endif

}  // extern "C"
