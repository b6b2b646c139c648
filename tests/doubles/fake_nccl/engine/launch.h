#pragma once

#include <memory>
#include <vector>

#include "engine/communicator.h"
#include "engine/stream.h"
#include "engine/task.h"

namespace fake_nccl {

// A call whose arguments are good, on its way to a stream.
struct Issued {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<HostStream> stream;
  Task task;
  std::shared_ptr<HostEvent> launch_event;  // recorded when the operation starts, if there is one
  float estimated_us = -1;                  // of collectives
};

// Puts the calls of one communicator into their streams, as one operation: where there are several
// streams, it starts when all have come to it and all go on when it is over.
void launch(std::vector<Issued> calls);

// From now on, until told otherwise, what is launched is of a graph too.
void capture(bool is_under_way);
// Destroys all graphs.
void destroy_graphs();

}  // namespace fake_nccl
