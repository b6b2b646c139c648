#include <string>

#include "api/api.h"
#include "api/birth.h"
#include "api/stream_handles.h"
#include "engine/group.h"
#include "engine/memory.h"

namespace fake_nccl {
namespace {

using Handle = std::shared_ptr<Communicator>;

// Ends what a rank has in a communicator that nothing runs on any more.
void end(ncclComm_t handle, const Handle& communicator) {
  communicator->leave();
  communicator->with_possessions([](Possessions* possessions) {
    for (const auto& window : possessions->windows) Registry<Window>::all().remove(window.first);
    possessions->windows.clear();
  });
  Registry<Communicator>::all().remove(handle);
}

// What a communicator says of itself.
ncclResult_t describe(Function function, ncclComm_t comm, int* value,
                      int (Communicator::*description)() const) {
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return entered;
  const Handle found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  if (found->state() != ncclSuccess) return found->ready();
  if (value == nullptr) return invalid(function, "the pointer is null");
  *value = ((*found).*description)();
  return ncclSuccess;
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const ncclResult_t entered = enter(Function::ncclGetUniqueId);
  if (entered != ncclSuccess) return entered;
  return id == nullptr ? invalid(Function::ncclGetUniqueId, "the pointer is null") : make_id(id);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  return note(create(Function::ncclCommInitRank, comm, num_ranks, id, rank, nullptr));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return note(create(Function::ncclCommInitRankConfig, comm, num_ranks, id, rank, config));
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int num_ranks, int rank, int num_ids,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
  const Function function = Function::ncclCommInitRankScalable;
  if (num_ids < 1 || num_ids > num_ranks || ids == nullptr) {
    return note(invalid(
        function, std::to_string(num_ids) + " ids for " + std::to_string(num_ranks) + " ranks"));
  }
  return note(create(function, comm, num_ranks, ids[0], rank, config));
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int num_devices, const int* devices) {
  const ncclResult_t entered = enter(Function::ncclCommInitAll);
  if (entered != ncclSuccess) return entered;
  ncclUniqueId id;
  const ncclResult_t made = make_id(&id);
  if (made != ncclSuccess) return made;
  const int device = current_device();
  start_group();
  for (int rank = 0; rank < num_devices; ++rank) {
    set_current_device(devices == nullptr ? rank : devices[rank]);
    note(create(Function::ncclCommInitRank, comms + rank, num_devices, id, rank, nullptr));
  }
  set_current_device(device);
  return end_group();
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Fate fate = fate_of(Function::ncclCommFinalize);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  ncclResult_t result;
  const Handle found = find_ready(comm, &result);
  if (found == nullptr) return note(result);
  if (found->is_revoked()) {
    return note(failed(ncclInvalidUsage, "ncclCommFinalize: the communicator is revoked"));
  }
  found->finalize();
  const auto flush = [found, fate] {
    if (fate.stalls) found->issue();  // as if something never came to its end
    return found->wait_for_issued() ? fate.async_error : ncclInternalError;
  };
  return note(submit(Job{{found}, flush, nullptr}));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const ncclResult_t entered = enter(Function::ncclCommDestroy);
  if (entered != ncclSuccess || comm == nullptr) return entered;
  const Handle found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  const std::size_t num_left = found->with_possessions(
      [](Possessions* possessions) { return possessions->registrations.size(); });
  if (num_left != 0) {
    return invalid(Function::ncclCommDestroy,
                   std::to_string(num_left) + " buffers or windows are registered still");
  }
  // Stays among the living until then, so that an abort by another thread ends the wait.
  found->wait_for_running();
  found->wait_for_issued();
  found->wait_for_graphs();
  end(comm, found);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const ncclResult_t entered = enter(Function::ncclCommAbort);
  if (entered != ncclSuccess || comm == nullptr) return entered;
  const Handle found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  found->abort();
  found->wait_for_graphs();
  end(comm, found);
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  const ncclResult_t entered = enter(Function::ncclCommRevoke);
  if (entered != ncclSuccess) return entered;
  if (flags != 0) {
    return invalid(Function::ncclCommRevoke, "flags are " + std::to_string(flags));
  }
  const Handle found = find_communicator(comm);  // one that has failed too
  if (found == nullptr) return ncclInvalidArgument;
  found->revoke();
  return note(
      submit(Job{{found},
                 [found] { return found->wait_for_issued() ? ncclSuccess : ncclInternalError; },
                 nullptr}));
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const ncclResult_t entered = enter(Function::ncclCommGetAsyncError);
  if (entered != ncclSuccess) return entered;
  const Handle found = find_communicator(comm);
  if (found == nullptr || error == nullptr) return ncclInvalidArgument;
  *error = found->state();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return describe(Function::ncclCommCount, comm, count, &Communicator::num_ranks);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return describe(Function::ncclCommCuDevice, comm, device, &Communicator::device);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return describe(Function::ncclCommUserRank, comm, rank, &Communicator::rank);
}
