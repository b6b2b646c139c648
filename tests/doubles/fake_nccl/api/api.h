#pragma once

#include <memory>

#include "api/registry.h"
#include "engine/communicator.h"
#include "engine/launch.h"
#include "interface/nccl_abi.h"
#include "settings/errors.h"
#include "settings/faults.h"
#include "settings/settings.h"

namespace fake_nccl {

// The start of a function that does its work at once: a call that is to stall never returns.
ncclResult_t enter(Function function);

// nullptr, with ncclGetLastError saying so, where the handle is no communicator of this process.
std::shared_ptr<Communicator> find_communicator(ncclComm_t handle);

// The same where it may be used now; `result` says why not.
std::shared_ptr<Communicator> find_ready(ncclComm_t handle, ncclResult_t* result);

// The communicator and the stream of a call, where they go together.
ncclResult_t find_place(Function function, ncclComm_t comm, cudaStream_t stream, Issued* issued);

ncclResult_t invalid(Function function, const std::string& text);

}  // namespace fake_nccl
