#pragma once

#include "interface/nccl_abi.h"

// What the double has beside NCCL's functions: streams and events on the host, as a device has
// them, and a look at what reached it. All return ncclSuccess, or what is said.

// Settings by the names of their environment variables; ncclInvalidArgument for one it has not.
FAKE_NCCL_API ncclResult_t fakeSet(const char* name, const char* value);

// The device of this thread, that of communicators and streams made on it; 0 at first.
FAKE_NCCL_API ncclResult_t fakeSetDevice(int device);
FAKE_NCCL_API ncclResult_t fakeGetDevice(int* device);

// NULL is the stream that every process has on device 0.
FAKE_NCCL_API ncclResult_t fakeStreamCreate(cudaStream_t* stream);
FAKE_NCCL_API ncclResult_t fakeStreamDestroy(cudaStream_t stream);
FAKE_NCCL_API ncclResult_t fakeStreamDevice(cudaStream_t stream, int* device);
FAKE_NCCL_API ncclResult_t fakeStreamLaunch(cudaStream_t stream, void (*operation)(void*),
                                            void* argument);
FAKE_NCCL_API ncclResult_t fakeStreamCopy(cudaStream_t stream, void* target, const void* source,
                                          std::size_t num_bytes);
FAKE_NCCL_API ncclResult_t fakeStreamSynchronize(cudaStream_t stream);
// ncclInProgress while something is to run, or runs.
FAKE_NCCL_API ncclResult_t fakeStreamQuery(cudaStream_t stream);

FAKE_NCCL_API ncclResult_t fakeEventCreate(cudaEvent_t* event);
FAKE_NCCL_API ncclResult_t fakeEventDestroy(cudaEvent_t event);
FAKE_NCCL_API ncclResult_t fakeEventRecord(cudaEvent_t event, cudaStream_t stream);
FAKE_NCCL_API ncclResult_t fakeStreamWaitEvent(cudaStream_t stream, cudaEvent_t event);
FAKE_NCCL_API ncclResult_t fakeEventSynchronize(cudaEvent_t event);
FAKE_NCCL_API ncclResult_t fakeEventQuery(cudaEvent_t event);

// What is put into streams between 1 and 0 is in a graph too, though it runs; no communicator ends
// while a graph has an operation of it. There is one way to destroy graphs: all of them.
FAKE_NCCL_API ncclResult_t fakeCapture(int is_under_way);
FAKE_NCCL_API ncclResult_t fakeDestroyGraphs();

// The configuration of a communicator and of its last call, as a library of the version played
// reads them.
FAKE_NCCL_API ncclResult_t fakeCommConfig(ncclComm_t comm, ncclConfig_t* config);
FAKE_NCCL_API ncclResult_t fakeCommCallConfig(ncclComm_t comm, ncclCollConfig_t* config);

// How many ranks have joined by an id that still waits for others.
FAKE_NCCL_API ncclResult_t fakeCountJoined(const ncclUniqueId* id, int* count);

// How many communicators, streams and events there are, and how much memory by ncclMemAlloc.
FAKE_NCCL_API ncclResult_t fakeCountObjects(int* communicators, int* streams, int* events,
                                            int* allocations);
