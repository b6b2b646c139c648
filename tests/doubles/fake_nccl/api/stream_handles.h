#pragma once

#include <memory>

#include "engine/stream.h"
#include "interface/nccl_abi.h"

namespace fake_nccl {

// nullptr where the handle stands for none; NULL stands for the stream that every process has.
std::shared_ptr<HostStream> find_stream(cudaStream_t handle);
std::shared_ptr<HostEvent> find_event(cudaEvent_t handle);

// The device of the calling thread.
int current_device();
void set_current_device(int device);

}  // namespace fake_nccl
