#include "api/birth.h"

#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "api/api.h"
#include "api/stream_handles.h"
#include "engine/group.h"

namespace fake_nccl {
namespace {

ncclComm_t add(const std::shared_ptr<Communicator>& communicator) {
  return static_cast<ncclComm_t>(Registry<Communicator>::all().add(communicator));
}

}  // namespace

ncclResult_t Birth::refusal(const ncclComm_t* made, const ncclConfig_t* config) {
  if (fate_.failure != ncclSuccess) return fate_.failure;
  if (made == nullptr) return invalid(function_, "the pointer to the communicator is null");
  return config_.read(config);
}

ncclResult_t Birth::submit(ncclComm_t* made, const std::shared_ptr<Communicator>& parent,
                           const std::function<ncclResult_t(Communicator*)>& work) const {
  const auto communicator = std::make_shared<Communicator>(device_, config_);
  *made = nullptr;
  Job job;
  job.communicators = {communicator};
  if (parent != nullptr) {
    job.communicators.push_back(parent);
  } else {
    *made = add(communicator);
    job.undo = [made, handle = *made] {
      Registry<Communicator>::all().remove(handle);
      *made = nullptr;
    };
  }
  job.work = [made, communicator, parent, work, fate = fate_] {
    const auto is_stopped = [&] {
      return communicator->is_aborted() || (parent != nullptr && parent->is_aborted());
    };
    while (fate.stalls && !is_stopped()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const ncclResult_t result = work(communicator.get());
    if (result != ncclSuccess || fate.async_error != ncclSuccess) {
      return result != ncclSuccess ? result : fate.async_error;
    }
    if (parent != nullptr && communicator->num_ranks() > 0) {
      // The caller may look at it meanwhile.
      __atomic_store_n(made, add(communicator), __ATOMIC_RELEASE);
    }
    return ncclSuccess;
  };
  return fake_nccl::submit(std::move(job));
}

ncclResult_t create(Function function, ncclComm_t* made, int num_ranks, const ncclUniqueId& id,
                    int rank, const ncclConfig_t* config) {
  Birth birth(function, Config(), current_device());
  const ncclResult_t refused = birth.refusal(made, config);
  if (refused != ncclSuccess) return refused;
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return invalid(function,
                   "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " ranks");
  }
  return birth.submit(made, nullptr, [=](Communicator* communicator) {
    return communicator->join(id, num_ranks, rank, [] { return false; }, [](int) { return -1; });
  });
}

ncclResult_t make_id(ncclUniqueId* id) {
  try {
    *id = Segment::make_id();
    return ncclSuccess;
  } catch (const std::system_error& error) {
    return failed(ncclSystemError, std::string("making a unique id: ") + error.what());
  }
}

}  // namespace fake_nccl
