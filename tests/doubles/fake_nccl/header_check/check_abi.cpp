// Compares the double's declarations with those of a real nccl.h. Compiled, never run.
#include <nccl.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

// What nccl.h leaves to headers for device code.
extern "C" ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t, size_t, int, void**);
extern "C" ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t, int, void**);
extern "C" ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void**);

// In a namespace and without C linkage, so that both can stand side by side.
namespace fake {
#define FAKE_NCCL_API
#include "../interface/nccl_abi.h"
}  // namespace fake

namespace {

template <typename Ours, typename Theirs>
constexpr bool travels_alike() {
  constexpr bool are_pointers = std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  constexpr bool are_numbers = (std::is_integral_v<Ours> || std::is_enum_v<Ours>) &&
                               (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
  constexpr bool are_structs = std::is_class_v<Ours> && std::is_class_v<Theirs>;
  return (are_pointers || are_numbers || are_structs) && sizeof(Ours) == sizeof(Theirs) &&
         alignof(Ours) == alignof(Theirs);
}

template <typename Result, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool is_called_alike(Result (*)(Ours...), TheirResult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return travels_alike<Result, TheirResult>() && (travels_alike<Ours, Theirs>() && ...);
  }
  return false;
}

#define FUNCTION(name, since) static_assert(is_called_alike(&fake::name, &::name), #name);
#include "../interface/functions.def"
#undef FUNCTION

#define SAME_STRUCT(name) static_assert(sizeof(fake::name) == sizeof(::name), #name)
SAME_STRUCT(ncclUniqueId);
SAME_STRUCT(ncclConfig_t);
SAME_STRUCT(ncclCollConfig_t);
SAME_STRUCT(ncclSimInfo_t);
SAME_STRUCT(ncclWaitSignalDesc_t);

#define SAME_FIELD(type, field) \
  static_assert(offsetof(fake::type, field) == offsetof(::type, field), #type "." #field)
SAME_FIELD(ncclConfig_t, magic);
SAME_FIELD(ncclConfig_t, blocking);
SAME_FIELD(ncclConfig_t, netName);
SAME_FIELD(ncclConfig_t, splitShare);
SAME_FIELD(ncclConfig_t, trafficClass);
SAME_FIELD(ncclConfig_t, commName);
SAME_FIELD(ncclConfig_t, collnetEnable);
SAME_FIELD(ncclConfig_t, CTAPolicy);
SAME_FIELD(ncclConfig_t, shrinkShare);
SAME_FIELD(ncclConfig_t, nvlsCTAs);
SAME_FIELD(ncclConfig_t, nChannelsPerNetPeer);
SAME_FIELD(ncclConfig_t, nvlinkCentricSched);
SAME_FIELD(ncclConfig_t, graphUsageMode);
SAME_FIELD(ncclConfig_t, numRmaCtx);
SAME_FIELD(ncclConfig_t, maxP2pPeers);
SAME_FIELD(ncclConfig_t, graphStreamOrdering);
SAME_FIELD(ncclConfig_t, launchOrderImplicit);
SAME_FIELD(ncclConfig_t, numRmaSig);
SAME_FIELD(ncclConfig_t, rmaEagerInit);
SAME_FIELD(ncclConfig_t, hostCftMode);
SAME_FIELD(ncclConfig_t, nvlsHostMode);
SAME_FIELD(ncclCollConfig_t, ext);
SAME_FIELD(ncclCollConfig_t, maxCTAs);
SAME_FIELD(ncclCollConfig_t, algSelection);
SAME_FIELD(ncclCollConfig_t, forceAlgSelection);
SAME_FIELD(ncclCollConfig_t, CTAPolicy);
SAME_FIELD(ncclCollConfig_t, userProfilerTag);
SAME_FIELD(ncclCollConfig_t, launchCompletionEvent);
SAME_FIELD(ncclSimInfo_t, estimatedTime);
SAME_FIELD(ncclWaitSignalDesc_t, ctx);

#define SAME_VALUE(name) \
  static_assert(static_cast<long>(fake::name) == static_cast<long>(::name), #name)
SAME_VALUE(ncclUnhandledCudaError);
SAME_VALUE(ncclSystemError);
SAME_VALUE(ncclInternalError);
SAME_VALUE(ncclInvalidArgument);
SAME_VALUE(ncclInvalidUsage);
SAME_VALUE(ncclRemoteError);
SAME_VALUE(ncclInProgress);
SAME_VALUE(ncclTimeout);
SAME_VALUE(ncclNumResults);
SAME_VALUE(ncclSum);
SAME_VALUE(ncclProd);
SAME_VALUE(ncclMax);
SAME_VALUE(ncclMin);
SAME_VALUE(ncclAvg);
SAME_VALUE(ncclNumOps);
SAME_VALUE(ncclMaxRedOp);
SAME_VALUE(ncclInt8);
SAME_VALUE(ncclUint8);
SAME_VALUE(ncclInt32);
SAME_VALUE(ncclUint32);
SAME_VALUE(ncclInt64);
SAME_VALUE(ncclUint64);
SAME_VALUE(ncclFloat16);
SAME_VALUE(ncclFloat32);
SAME_VALUE(ncclFloat64);
SAME_VALUE(ncclBfloat16);
SAME_VALUE(ncclFloat8e4m3);
SAME_VALUE(ncclFloat8e5m2);
SAME_VALUE(ncclNumTypes);
SAME_VALUE(ncclScalarDevice);
SAME_VALUE(ncclScalarHostImmediate);
static_assert(fake::kConfigMagic == NCCL_API_MAGIC && fake::kUndefinedInt == NCCL_CONFIG_UNDEF_INT);
static_assert(fake::kNoColor == NCCL_SPLIT_NOCOLOR && fake::kShrinkAbort == NCCL_SHRINK_ABORT);

}  // namespace
