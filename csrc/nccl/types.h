#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

// What NCCL's functions take and return, declared by hand as of NCCL 2.32.3 and by NCCL's names, so
// that nothing of NCCL or CUDA is needed to build. tests/csrc/nccl/header_check.h
// holds all of it against a real nccl.h.
struct CUstream_st;
struct CUevent_st;

namespace tritondt::nccl {

using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;

// The version of these declarations, and the oldest library they are used with.
constexpr int kHeaderVersion = 23203;
constexpr int kOldestVersion = 21801;

constexpr int kUniqueIdBytes = 128;
struct ncclUniqueId {
  char internal[kUniqueIdBytes];
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
  ncclTimeout = 8,  // 2.30
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
  ncclFloat8e4m3 = 10,  // 2.24
  ncclFloat8e5m2 = 11,  // 2.24
};

// From ncclNumOps on, operators that ncclRedOpCreatePreMulSum has made.
enum ncclRedOp_t {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff,
};

enum ncclScalarResidence_t { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

constexpr int kUndefinedInt = INT_MIN;
constexpr float kUndefinedFloat = -1.0f;
constexpr int kNoColor = -1;
constexpr int kRevokeDefault = 0;
constexpr int kShrinkDefault = 0;
constexpr int kShrinkAbort = 1;  // ends what is under way first
constexpr int kWindowSymmetric = 1;
constexpr unsigned int kConfigMagic = 0xcafebeef;
constexpr unsigned int kSimulationMagic = 0x74685283;

// Both configurations only ever grow at the end; config.cpp knows what came when. The defaults are
// those of NCCL's initializers.
struct ncclConfig_t {
  std::size_t size = sizeof(ncclConfig_t);
  unsigned int magic = kConfigMagic;
  unsigned int version = kHeaderVersion;
  int blocking = kUndefinedInt;
  int cgaClusterSize = kUndefinedInt;
  int minCTAs = kUndefinedInt;
  int maxCTAs = kUndefinedInt;
  const char* netName = nullptr;
  int splitShare = kUndefinedInt;
  int trafficClass = kUndefinedInt;
  const char* commName = nullptr;
  int collnetEnable = kUndefinedInt;
  int CTAPolicy = kUndefinedInt;
  int shrinkShare = kUndefinedInt;
  int nvlsCTAs = kUndefinedInt;
  int nChannelsPerNetPeer = kUndefinedInt;
  int nvlinkCentricSched = kUndefinedInt;
  int graphUsageMode = kUndefinedInt;
  int numRmaCtx = kUndefinedInt;
  int maxP2pPeers = kUndefinedInt;
  int graphStreamOrdering = kUndefinedInt;
  int launchOrderImplicit = kUndefinedInt;
  int numRmaSig = kUndefinedInt;
  int rmaEagerInit = kUndefinedInt;
  int hostCftMode = kUndefinedInt;
  int nvlsHostMode = kUndefinedInt;
};

struct ncclCollConfig_t {
  std::size_t size = sizeof(ncclCollConfig_t);
  unsigned int magic = kConfigMagic;
  unsigned int version = kHeaderVersion;
  void* ext = nullptr;  // options of vendors, which NCCL itself ignores
  int minCTAs = kUndefinedInt;
  int maxCTAs = kUndefinedInt;
  int nvlsCTAs = kUndefinedInt;
  int cgaClusterSize = kUndefinedInt;
  const char* algSelection = nullptr;
  int forceAlgSelection = 1;
  int CTAPolicy = kUndefinedInt;
  std::uint64_t userProfilerTag = 0;
  cudaEvent_t launchCompletionEvent = nullptr;
};

struct ncclSimInfo_t {
  std::size_t size = sizeof(ncclSimInfo_t);
  unsigned int magic = kSimulationMagic;
  unsigned int version = kHeaderVersion;
  float estimatedTime = kUndefinedFloat;
};

struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};

}  // namespace tritondt::nccl
