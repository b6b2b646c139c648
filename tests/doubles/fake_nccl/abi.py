"""NCCL's binary interface in the words of ctypes, as far as the test double offers it."""

import ctypes
from typing import Any

NEWEST = 23203
RESULTS = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
SUM, PROD, MAX, MIN, AVG = range(5)
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 = range(12)
UNDEFINED = -(2**31)
CONFIG_MAGIC = 0xCAFEBEEF

# Parameters of each function: (p)ointer, (n)umber of bytes or elements, (i)nteger, (u)nsigned, unique i(d).
_COLLECTIVES = {
    "ncclAllReduce": "ppniipp",
    "ncclReduceScatter": "ppniipp",
    "ncclReduce": "ppniiipp",
    "ncclAllGather": "ppnipp",
    "ncclAlltoAll": "ppnipp",
    "ncclBroadcast": "ppniipp",
    "ncclGather": "ppniipp",
    "ncclScatter": "ppniipp",
}
PARAMETERS = {
    **_COLLECTIVES,
    **{f"{name}Config": f"{parameters}p" for name, parameters in _COLLECTIVES.items()},
    "ncclBcast": "pniipp",
    "ncclGetVersion": "p",
    "ncclMemAlloc": "pn",
    "ncclMemFree": "p",
    "ncclGetUniqueId": "p",
    "ncclCommInitRank": "pidi",
    "ncclCommInitRankConfig": "pidip",
    "ncclCommInitRankScalable": "piiipp",
    "ncclCommInitAll": "pip",
    "ncclCommSplit": "piipp",
    "ncclCommShrink": "ppippi",
    "ncclCommGetUniqueId": "pp",
    "ncclCommGrow": "pipipp",
    "ncclCommFinalize": "p",
    "ncclCommDestroy": "p",
    "ncclCommAbort": "p",
    "ncclCommRevoke": "pi",
    "ncclCommGetAsyncError": "pp",
    "ncclCommCount": "pp",
    "ncclCommCuDevice": "pp",
    "ncclCommUserRank": "pp",
    "ncclCommRegister": "ppnp",
    "ncclCommDeregister": "pp",
    "ncclRedOpCreatePreMulSum": "ppiip",
    "ncclRedOpDestroy": "ip",
    "ncclSend": "pniipp",
    "ncclRecv": "pniipp",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclGroupSimulateEnd": "p",
    "ncclCommWindowRegister": "ppnpi",
    "ncclCommWindowDeregister": "pp",
    "ncclWinGetUserPtr": "ppp",
    "ncclGetLsaDevicePointer": "pnip",
    "ncclGetPeerDevicePointer": "pnip",
    "ncclGetLsaMultimemDevicePointer": "pnp",
    "ncclPutSignal": "pniipniiupp",
    "ncclSignal": "iiiupp",
    "ncclWaitSignal": "ippp",
    "fakeSet": "pp",
    "fakeCapture": "i",
    "fakeDestroyGraphs": "",
    "fakeSetDevice": "i",
    "fakeGetDevice": "p",
    "fakeStreamCreate": "p",
    "fakeStreamDestroy": "p",
    "fakeStreamDevice": "pp",
    "fakeStreamLaunch": "ppp",
    "fakeStreamCopy": "pppn",
    "fakeStreamSynchronize": "p",
    "fakeStreamQuery": "p",
    "fakeEventCreate": "p",
    "fakeEventDestroy": "p",
    "fakeEventRecord": "pp",
    "fakeStreamWaitEvent": "pp",
    "fakeEventSynchronize": "p",
    "fakeEventQuery": "p",
    "fakeCommConfig": "pp",
    "fakeCommCallConfig": "pp",
    "fakeCountJoined": "pp",
    "fakeCountObjects": "pppp",
}


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int) for name in names]


def _initial(structure: ctypes.Structure) -> dict[str, int]:
    """What NCCL's initialisers set: a header, and nothing said in all other integers."""
    undefined = {field[0]: UNDEFINED for field in structure._fields_ if field[1] is ctypes.c_int}
    return {**undefined, "size": ctypes.sizeof(structure), "magic": CONFIG_MAGIC, "version": NEWEST}


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.32.3; fields by their names, undefined where nothing is said."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *_integers("blocking", "cgaClusterSize", "minCTAs", "maxCTAs"),
        ("netName", ctypes.c_char_p),
        *_integers("splitShare", "trafficClass"),
        ("commName", ctypes.c_char_p),
        *_integers("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs", "nChannelsPerNetPeer"),
        *_integers("nvlinkCentricSched", "graphUsageMode", "numRmaCtx", "maxP2pPeers", "graphStreamOrdering"),
        *_integers("launchOrderImplicit", "numRmaSig", "rmaEagerInit", "hostCftMode", "nvlsHostMode"),
    ]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**_initial(self), **fields})


class CallConfig(ctypes.Structure):
    """ncclCollConfig_t as of 2.32.3."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("ext", ctypes.c_void_p),
        *_integers("minCTAs", "maxCTAs", "nvlsCTAs", "cgaClusterSize"),
        ("algSelection", ctypes.c_char_p),
        *_integers("forceAlgSelection", "CTAPolicy"),
        ("userProfilerTag", ctypes.c_uint64),
        ("launchCompletionEvent", ctypes.c_void_p),
    ]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**_initial(self), "forceAlgSelection": 1, **fields})


class Simulation(ctypes.Structure):
    """ncclSimInfo_t."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    ]

    def __init__(self) -> None:
        super().__init__(ctypes.sizeof(self), 0x74685283, NEWEST, -1.0)


class Awaited(ctypes.Structure):
    """ncclWaitSignalDesc_t."""

    _fields_ = _integers("opCnt", "peer", "sigIdx", "ctx")


TYPES = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_size_t,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "d": UniqueId,
}
