#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

// The binary interface that the test double offers: NCCL's C functions as of 2.32.3, declared by
// hand. check_abi.cpp compares it with the nccl.h of a real package. What the double adds of its
// own is in fake_api.h.
#ifndef FAKE_NCCL_API
#define FAKE_NCCL_API extern "C" __attribute__((visibility("default")))
#endif

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
struct ncclComm;
struct ncclWindow_vidmem;
using ncclComm_t = ncclComm*;
using ncclWindow_t = ncclWindow_vidmem*;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
  ncclNumResults = 9
};

enum ncclRedOp_t {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = INT_MAX
};

enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
};

enum ncclScalarResidence_t { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

constexpr unsigned int kConfigMagic = 0xcafebeef;
constexpr unsigned int kSimulationMagic = 0x74685283;
constexpr int kUndefinedInt = INT_MIN;
constexpr int kNoColor = -1;
constexpr int kShrinkAbort = 1;

struct ncclConfig_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
  int launchOrderImplicit;
  int numRmaSig;
  int rmaEagerInit;
  int hostCftMode;
  int nvlsHostMode;
};

struct ncclConfigExt_t;

struct ncclCollConfig_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  ncclConfigExt_t* ext;
  int minCTAs;
  int maxCTAs;
  int nvlsCTAs;
  int cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection;
  int CTAPolicy;
  std::uint64_t userProfilerTag;
  cudaEvent_t launchCompletionEvent;
};

struct ncclSimInfo_t {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
  float estimatedTime;
};

struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};

// The library, its errors and its memory.
FAKE_NCCL_API ncclResult_t ncclGetVersion(int* version);
FAKE_NCCL_API const char* ncclGetErrorString(ncclResult_t result);
FAKE_NCCL_API const char* ncclGetLastError(ncclComm_t comm);
FAKE_NCCL_API ncclResult_t ncclMemAlloc(void** pointer, std::size_t num_bytes);
FAKE_NCCL_API ncclResult_t ncclMemFree(void* pointer);

// Making and ending communicators.
FAKE_NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
FAKE_NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id,
                                            int rank);
FAKE_NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id,
                                                  int rank, ncclConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int num_ranks, int rank,
                                                    int num_ids, ncclUniqueId* ids,
                                                    ncclConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int num_devices, const int* devices);
FAKE_NCCL_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                                         ncclConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int num_excluded,
                                          ncclComm_t* made, ncclConfig_t* config, int flags);
FAKE_NCCL_API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id);
FAKE_NCCL_API ncclResult_t ncclCommGrow(ncclComm_t comm, int num_ranks, const ncclUniqueId* id,
                                        int rank, ncclComm_t* made, ncclConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
FAKE_NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
FAKE_NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm);
FAKE_NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);

// What a communicator says of itself, and what it is told of buffers and of operations.
FAKE_NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
FAKE_NCCL_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
FAKE_NCCL_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
FAKE_NCCL_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
FAKE_NCCL_API ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, std::size_t size,
                                            void** handle);
FAKE_NCCL_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
FAKE_NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                    ncclDataType_t dtype,
                                                    ncclScalarResidence_t residence,
                                                    ncclComm_t comm);
FAKE_NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

// Collectives and messages.
FAKE_NCCL_API ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t count,
                                         ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                         cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t count,
                                             ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                             cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclReduce(const void* source, void* target, std::size_t count,
                                      ncclDataType_t dtype, ncclRedOp_t op, int root,
                                      ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclAllGather(const void* source, void* target, std::size_t count,
                                         ncclDataType_t dtype, ncclComm_t comm,
                                         cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclAlltoAll(const void* source, void* target, std::size_t count,
                                        ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t dtype,
                                     int root, ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t count,
                                         ncclDataType_t dtype, int root, ncclComm_t comm,
                                         cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclGather(const void* source, void* target, std::size_t count,
                                      ncclDataType_t dtype, int root, ncclComm_t comm,
                                      cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclScatter(const void* source, void* target, std::size_t count,
                                       ncclDataType_t dtype, int root, ncclComm_t comm,
                                       cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclSend(const void* source, std::size_t count, ncclDataType_t dtype,
                                    int peer, ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclRecv(void* target, std::size_t count, ncclDataType_t dtype, int peer,
                                    ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclGroupStart();
FAKE_NCCL_API ncclResult_t ncclGroupEnd();
FAKE_NCCL_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simulation);

// The same with a configuration of the call.
FAKE_NCCL_API ncclResult_t ncclAllReduceConfig(const void* source, void* target, std::size_t count,
                                               ncclDataType_t dtype, ncclRedOp_t op,
                                               ncclComm_t comm, cudaStream_t stream,
                                               const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclReduceScatterConfig(const void* source, void* target,
                                                   std::size_t count, ncclDataType_t dtype,
                                                   ncclRedOp_t op, ncclComm_t comm,
                                                   cudaStream_t stream,
                                                   const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclReduceConfig(const void* source, void* target, std::size_t count,
                                            ncclDataType_t dtype, ncclRedOp_t op, int root,
                                            ncclComm_t comm, cudaStream_t stream,
                                            const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclAllGatherConfig(const void* source, void* target, std::size_t count,
                                               ncclDataType_t dtype, ncclComm_t comm,
                                               cudaStream_t stream, const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclAlltoAllConfig(const void* source, void* target, std::size_t count,
                                              ncclDataType_t dtype, ncclComm_t comm,
                                              cudaStream_t stream, const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclBroadcastConfig(const void* source, void* target, std::size_t count,
                                               ncclDataType_t dtype, int root, ncclComm_t comm,
                                               cudaStream_t stream, const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclGatherConfig(const void* source, void* target, std::size_t count,
                                            ncclDataType_t dtype, int root, ncclComm_t comm,
                                            cudaStream_t stream, const ncclCollConfig_t* config);
FAKE_NCCL_API ncclResult_t ncclScatterConfig(const void* source, void* target, std::size_t count,
                                             ncclDataType_t dtype, int root, ncclComm_t comm,
                                             cudaStream_t stream, const ncclCollConfig_t* config);

// Windows: memory that others write to.
FAKE_NCCL_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, std::size_t size,
                                                  ncclWindow_t* window, int flags);
FAKE_NCCL_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
FAKE_NCCL_API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer);
FAKE_NCCL_API ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, std::size_t offset,
                                                   int rank, void** pointer);
FAKE_NCCL_API ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, std::size_t offset,
                                                    int peer, void** pointer);
FAKE_NCCL_API ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, std::size_t offset,
                                                           void** pointer);
FAKE_NCCL_API ncclResult_t ncclPutSignal(const void* source, std::size_t count,
                                         ncclDataType_t dtype, int peer, ncclWindow_t window,
                                         std::size_t offset, int signal, int context,
                                         unsigned int flags, ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclSignal(int peer, int signal, int context, unsigned int flags,
                                      ncclComm_t comm, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t ncclWaitSignal(int num_awaited, ncclWaitSignalDesc_t* awaited,
                                          ncclComm_t comm, cudaStream_t stream);
