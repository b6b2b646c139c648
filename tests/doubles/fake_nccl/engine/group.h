#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/communicator.h"
#include "engine/launch.h"

namespace fake_nccl {

// The making or ending of a communicator: `work` meets other ranks, so it may take long.
struct Job {
  // In progress meanwhile; background work goes on until one of them is aborted.
  std::vector<std::shared_ptr<Communicator>> communicators;
  std::function<ncclResult_t()> work;
  std::function<void()> undo;  // of what was handed out, where a caller waited and it failed
};

// Each goes its way at once, or when the group of the calling thread ends. With communicators that
// do not block, ncclInProgress may come back.
ncclResult_t submit(Issued call);
ncclResult_t submit(Job job);

// Hands a failure back; within a group its end fails too, and nothing of it happens.
ncclResult_t note(ncclResult_t result);

void start_group();
ncclResult_t end_group();
// Ends the group without running it, and leaves its messages queued as NCCL does; what its last
// collective would have taken, in microseconds, -1 without any.
ncclResult_t simulate_group(float* estimated_us);

}  // namespace fake_nccl
