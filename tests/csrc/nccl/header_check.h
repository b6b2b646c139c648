#pragma once

// Holds our declarations of NCCL against the nccl.h that is on the include path, of 2.18 or later.
// Everything is compared when this is compiled, but for what `wrong_sizes` says when it is run. The
// functions come from a list: see test_nccl_header.py.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "nccl/api.h"
#include "nccl/config.h"

namespace ours = tritondt::nccl;

// Whether a function may be called with one type declared as the other: the same type, or two names
// of one struct or enum, or pointers to such.
template <typename Ours, typename Theirs>
struct Same : std::is_same<Ours, Theirs> {};
template <typename Ours, typename Theirs>
struct Same<Ours*, Theirs*> : Same<Ours, Theirs> {};
template <typename Ours, typename Theirs>
struct Same<const Ours, const Theirs> : Same<Ours, Theirs> {};
template <typename Ours, typename... OurParameters, typename Theirs, typename... TheirParameters>
struct Same<Ours(OurParameters...), Theirs(TheirParameters...)> {
  template <typename... Pairs>
  static constexpr bool all(Pairs...) {
    return (Pairs::value && ...);
  }
  static constexpr bool compare() {
    if constexpr (sizeof...(OurParameters) == sizeof...(TheirParameters)) {
      return all(Same<Ours, Theirs>{}, Same<OurParameters, TheirParameters>{}...);
    }
    return false;
  }
  static constexpr bool value = compare();
};

#define NAMED_ALIKE(Ours, Theirs)                                                                 \
  template <>                                                                                     \
  struct Same<Ours, Theirs> : std::true_type {};                                                  \
  static_assert(sizeof(Ours) == sizeof(Theirs) && std::is_enum_v<Ours> == std::is_enum_v<Theirs>, \
                #Ours)

template <>
struct Same<std::remove_pointer_t<ours::ncclComm_t>, std::remove_pointer_t<ncclComm_t>>
    : std::true_type {};
NAMED_ALIKE(ours::ncclUniqueId, ncclUniqueId);
NAMED_ALIKE(ours::ncclResult_t, ncclResult_t);
NAMED_ALIKE(ours::ncclDataType_t, ncclDataType_t);
NAMED_ALIKE(ours::ncclRedOp_t, ncclRedOp_t);
NAMED_ALIKE(ours::ncclScalarResidence_t, ncclScalarResidence_t);
// An older one is the beginning of ours.
template <>
struct Same<ours::ncclConfig_t, ncclConfig_t> : std::true_type {};

#define VALUE(name) static_assert(int{ours::name} == int{name}, #name)
VALUE(ncclSuccess);
VALUE(ncclUnhandledCudaError);
VALUE(ncclSystemError);
VALUE(ncclInternalError);
VALUE(ncclInvalidArgument);
VALUE(ncclInvalidUsage);
VALUE(ncclRemoteError);
VALUE(ncclInProgress);
VALUE(ncclInt8);
VALUE(ncclUint8);
VALUE(ncclInt32);
VALUE(ncclUint32);
VALUE(ncclInt64);
VALUE(ncclUint64);
VALUE(ncclFloat16);
VALUE(ncclFloat32);
VALUE(ncclFloat64);
VALUE(ncclBfloat16);
VALUE(ncclSum);
VALUE(ncclProd);
VALUE(ncclMax);
VALUE(ncclMin);
VALUE(ncclAvg);
VALUE(ncclNumOps);
VALUE(ncclMaxRedOp);
VALUE(ncclScalarDevice);
VALUE(ncclScalarHostImmediate);

static_assert(ours::kHeaderVersion >= NCCL_VERSION_CODE, "a newer nccl.h than is declared");
static_assert(ours::kUniqueIdBytes == NCCL_UNIQUE_ID_BYTES);
static_assert(ours::kUndefinedInt == NCCL_CONFIG_UNDEF_INT);
static_assert(ours::kNoColor == NCCL_SPLIT_NOCOLOR);

constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr ours::ncclConfig_t kOurs;
#define FIELD(Struct, our, their, field)                                       \
  static_assert(offsetof(ours::Struct, field) == offsetof(Struct, field) &&    \
                    Same<decltype(our.field), decltype(their.field)>::value && \
                    our.field == their.field,                                  \
                #Struct "." #field)
#define CONFIG(field) FIELD(ncclConfig_t, kOurs, kTheirs, field)
static_assert(offsetof(ours::ncclConfig_t, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(ours::ncclConfig_t, version) == offsetof(ncclConfig_t, version));
CONFIG(magic);
CONFIG(blocking);
CONFIG(cgaClusterSize);
CONFIG(minCTAs);
CONFIG(maxCTAs);
CONFIG(netName);
CONFIG(splitShare);

#if NCCL_VERSION_CODE >= 22203
template <>
struct Same<ours::ncclSimInfo_t, ncclSimInfo_t> : std::true_type {};
constexpr ncclSimInfo_t kTheirInfo = NCCL_SIM_INFO_INITIALIZER;
constexpr ours::ncclSimInfo_t kOurInfo;
FIELD(ncclSimInfo_t, kOurInfo, kTheirInfo, size);
FIELD(ncclSimInfo_t, kOurInfo, kTheirInfo, magic);
FIELD(ncclSimInfo_t, kOurInfo, kTheirInfo, estimatedTime);
static_assert(offsetof(ours::ncclSimInfo_t, version) == offsetof(ncclSimInfo_t, version));
static_assert(sizeof(ours::ncclSimInfo_t) == sizeof(ncclSimInfo_t));
#endif

#if NCCL_VERSION_CODE >= 22403
VALUE(ncclFloat8e4m3);
VALUE(ncclFloat8e5m2);
#endif

#if NCCL_VERSION_CODE >= 22602
CONFIG(trafficClass);
#endif

#if NCCL_VERSION_CODE >= 22703
template <>
struct Same<std::remove_pointer_t<ours::ncclWindow_t>, std::remove_pointer_t<ncclWindow_t>>
    : std::true_type {};
static_assert(ours::kWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(ours::kShrinkDefault == NCCL_SHRINK_DEFAULT);
static_assert(ours::kShrinkAbort == NCCL_SHRINK_ABORT);
CONFIG(commName);
CONFIG(collnetEnable);
CONFIG(CTAPolicy);
CONFIG(shrinkShare);
CONFIG(nvlsCTAs);
#endif

#if NCCL_VERSION_CODE >= 22807
static_assert(ours::kRevokeDefault == NCCL_REVOKE_DEFAULT);
CONFIG(nChannelsPerNetPeer);
CONFIG(nvlinkCentricSched);
#endif

#if NCCL_VERSION_CODE >= 22902
#define SIGNAL(field)                                                                       \
  static_assert(                                                                            \
      offsetof(ours::ncclWaitSignalDesc_t, field) == offsetof(ncclWaitSignalDesc_t, field), \
      #field)
NAMED_ALIKE(ours::ncclWaitSignalDesc_t, ncclWaitSignalDesc_t);
SIGNAL(opCnt);
SIGNAL(peer);
SIGNAL(sigIdx);
SIGNAL(ctx);
CONFIG(graphUsageMode);
CONFIG(numRmaCtx);
#endif

#if NCCL_VERSION_CODE >= 23005
VALUE(ncclTimeout);
CONFIG(maxP2pPeers);
CONFIG(graphStreamOrdering);
#endif

#if NCCL_VERSION_CODE >= 23102
template <>
struct Same<ours::ncclCollConfig_t, ncclCollConfig_t> : std::true_type {};
constexpr ncclCollConfig_t kTheirCall = NCCL_COLLCONFIG_INITIALIZER;
constexpr ours::ncclCollConfig_t kOurCall;
#define CALL(field) FIELD(ncclCollConfig_t, kOurCall, kTheirCall, field)
CONFIG(launchOrderImplicit);
CONFIG(numRmaSig);
CONFIG(rmaEagerInit);
CONFIG(hostCftMode);
static_assert(offsetof(ours::ncclCollConfig_t, size) == offsetof(ncclCollConfig_t, size));
static_assert(offsetof(ours::ncclCollConfig_t, version) == offsetof(ncclCollConfig_t, version));
static_assert(offsetof(ours::ncclCollConfig_t, ext) == offsetof(ncclCollConfig_t, ext));
CALL(magic);
CALL(minCTAs);
CALL(maxCTAs);
CALL(nvlsCTAs);
CALL(cgaClusterSize);
CALL(algSelection);
CALL(forceAlgSelection);
CALL(CTAPolicy);
CALL(userProfilerTag);
#endif

#if NCCL_VERSION_CODE >= 23203
CONFIG(nvlsHostMode);
CALL(launchCompletionEvent);
static_assert(sizeof(ours::ncclConfig_t) == sizeof(ncclConfig_t));
static_assert(sizeof(ours::ncclCollConfig_t) == sizeof(ncclCollConfig_t));
#endif

#define FUNCTION(name) \
  static_assert(Same<decltype(ours::Api::name)::Signature, decltype(::name)>::value, #name)

// How many sizes nccl/config.cpp does not know as this header has them.
inline int wrong_sizes() {
  int count = ours::size_in<ours::ncclConfig_t>(NCCL_VERSION_CODE) != sizeof(ncclConfig_t);
#if NCCL_VERSION_CODE >= 23102
  count += ours::size_in<ours::ncclCollConfig_t>(NCCL_VERSION_CODE) != sizeof(ncclCollConfig_t);
#endif
  return count;
}
