#include "engine/memory.h"

#include <string>
#include <system_error>
#include <utility>

#include "api/api.h"
#include "api/registry.h"
#include "engine/group.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

std::shared_ptr<Window> find_window(Communicator* communicator, ncclWindow_t window) {
  return communicator->with_possessions([window](Possessions* possessions) {
    const auto found = possessions->windows.find(window);
    return found == possessions->windows.end() ? nullptr : found->second;
  });
}

// Whether bytes lie in a window of this rank, as NCCL asks of what is put (2.30.7).
bool lies_in_window(Communicator* communicator, const void* bytes, std::size_t num_bytes) {
  const int rank = communicator->rank();
  return communicator->with_possessions([=](Possessions* possessions) {
    for (const auto& [_, window] : possessions->windows) {
      if (window->holds(rank, bytes, num_bytes)) return true;
    }
    return false;
  });
}

// Where a peer's part of a window lies; windows that are asked without their communicator are
// looked up among all.
ncclResult_t locate(Function function, ncclWindow_t window, std::size_t offset, int rank,
                    void** pointer) {
  const ncclResult_t entered = enter(function);
  if (entered != ncclSuccess) return entered;
  const auto found = Registry<Window>::all().find(window);
  if (found == nullptr || pointer == nullptr) return invalid(function, "there is no such window");
  *pointer = found->at(rank, offset);
  return *pointer != nullptr ? ncclSuccess
                             : invalid(function, "byte " + std::to_string(offset) + " of rank " +
                                                     std::to_string(rank) + " is not in there");
}

// What one-sided operations have in common.
ncclResult_t submit_one_sided(Function function, const Fate& fate, ncclComm_t comm,
                              cudaStream_t stream, Task task) {
  Issued issued;
  const ncclResult_t result = find_place(function, comm, stream, &issued);
  if (result != ncclSuccess) return result;
  const auto is_rank = [&](int rank) {
    return rank >= 0 && rank < issued.communicator->num_ranks();
  };
  for (const Put& put : task.puts) {
    if (!is_rank(put.peer)) return invalid(function, "peer " + std::to_string(put.peer));
  }
  for (const Awaited& awaited : task.awaited) {
    if (!is_rank(awaited.peer)) return invalid(function, "peer " + std::to_string(awaited.peer));
  }
  issued.task = std::move(task);
  issued.task.fate = fate;
  return submit(std::move(issued));
}

// There is one signal in one context, as in NCCL up to 2.30.
bool is_known(int signal, int context, unsigned int flags) {
  return signal == 0 && context == 0 && flags == 0;
}

ncclResult_t unknown_signal(Function function) {
  return invalid(function, "signal, context and flags must be 0");
}

ncclResult_t put(const void* source, std::size_t num_bytes, int peer, ncclWindow_t window,
                 std::size_t offset, ncclComm_t comm, cudaStream_t stream, const Fate& fate) {
  const Function function = Function::ncclPutSignal;
  const auto communicator = find_communicator(comm);
  if (communicator == nullptr) return ncclInvalidArgument;
  const auto found = find_window(communicator.get(), window);
  if (found == nullptr) return invalid(function, "there is no such window");
  void* target = found->at(peer, offset, num_bytes);
  if (target == nullptr) {
    return invalid(function, std::to_string(num_bytes) + " bytes from byte " +
                                 std::to_string(offset) + " of rank " + std::to_string(peer) +
                                 " are not in the window");
  }
  if (!lies_in_window(communicator.get(), source, num_bytes)) {
    return invalid(function, "the source is not in a symmetric window");
  }
  Task task;
  task.puts.push_back({{source, target, num_bytes}, peer, found});
  return submit_one_sided(function, fate, comm, stream, std::move(task));
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

ncclResult_t ncclMemAlloc(void** pointer, std::size_t num_bytes) {
  const ncclResult_t entered = enter(Function::ncclMemAlloc);
  if (entered != ncclSuccess) return entered;
  if (pointer == nullptr) return invalid(Function::ncclMemAlloc, "the pointer is null");
  try {
    *pointer = allocate(num_bytes);
    return ncclSuccess;
  } catch (const std::system_error& error) {
    return failed(ncclSystemError, std::string("ncclMemAlloc: ") + error.what());
  }
}

ncclResult_t ncclMemFree(void* pointer) {
  const ncclResult_t entered = enter(Function::ncclMemFree);
  if (entered != ncclSuccess || pointer == nullptr) return entered;
  if (is_registered(pointer)) {
    return invalid(Function::ncclMemFree, "it is registered with a communicator");
  }
  return release(pointer) ? ncclSuccess
                          : invalid(Function::ncclMemFree, "it is not of ncclMemAlloc");
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, std::size_t size,
                              void** handle) {
  const ncclResult_t entered = enter(Function::ncclCommRegister);
  if (entered != ncclSuccess) return entered;
  ncclResult_t result;
  const auto found = find_ready(comm, &result);
  if (found == nullptr) return result;
  if (buffer == nullptr || size == 0 || handle == nullptr) {
    return invalid(Function::ncclCommRegister, "there is no buffer, or no place for the handle");
  }
  *handle = new_handle();
  found->with_possessions([&](Possessions* possessions) {
    possessions->registrations[*handle] = std::make_shared<Registration>(buffer);
  });
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const ncclResult_t entered = enter(Function::ncclCommDeregister);
  if (entered != ncclSuccess) return entered;
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  const bool is_there = found->with_possessions(
      [handle](Possessions* possessions) { return possessions->registrations.erase(handle) == 1; });
  return is_there ? ncclSuccess
                  : invalid(Function::ncclCommDeregister, "there is no such registration");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, std::size_t size,
                                    ncclWindow_t* window, int) {
  const Fate fate = fate_of(Function::ncclCommWindowRegister);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  ncclResult_t result;
  const auto found = find_ready(comm, &result);
  if (found == nullptr) return note(result);
  if (window == nullptr) return note(invalid(Function::ncclCommWindowRegister, "no window"));
  *window = nullptr;
  return note(submit(Job{{found},
                         [=] {
                           std::shared_ptr<Window> made;
                           const ncclResult_t done = Window::make(found.get(), buffer, size, &made);
                           if (made == nullptr) return done;
                           found->with_possessions([&](Possessions* possessions) {
                             *window = static_cast<ncclWindow_t>(Registry<Window>::all().add(made));
                             possessions->windows[*window] = made;
                             possessions->registrations[*window] =
                                 std::make_shared<Registration>(buffer);
                           });
                           return done;
                         },
                         nullptr}));
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  const ncclResult_t entered = enter(Function::ncclCommWindowDeregister);
  if (entered != ncclSuccess || window == nullptr) return entered;
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  Registry<Window>::all().remove(window);
  const bool is_there = found->with_possessions([window](Possessions* possessions) {
    possessions->registrations.erase(window);
    return possessions->windows.erase(window) == 1;
  });
  return is_there ? ncclSuccess
                  : invalid(Function::ncclCommWindowDeregister, "there is no such window");
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  return locate(Function::ncclWinGetUserPtr, window, 0, found->rank(), pointer);
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, std::size_t offset, int rank,
                                     void** pointer) {
  return locate(Function::ncclGetLsaDevicePointer, window, offset, rank, pointer);
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, std::size_t offset, int peer,
                                      void** pointer) {
  const ncclResult_t found =
      locate(Function::ncclGetPeerDevicePointer, window, offset, peer, pointer);
  // As in NCCL, a rank that cannot be loaded from has success and no address.
  const int team = settings().lsa_ranks;
  if (found == ncclSuccess && team != 0 &&
      Registry<Window>::all().find(window)->own_rank() / team != peer / team) {
    *pointer = nullptr;
  }
  return found;
}

// As where the GPUs have no multimem: success, and no address.
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, std::size_t offset,
                                             void** pointer) {
  const ncclResult_t found =
      locate(Function::ncclGetLsaMultimemDevicePointer, window, offset, 0, pointer);
  if (found == ncclSuccess) *pointer = nullptr;
  return found;
}

ncclResult_t ncclPutSignal(const void* source, std::size_t count, ncclDataType_t dtype, int peer,
                           ncclWindow_t window, std::size_t offset, int signal, int context,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  const Function function = Function::ncclPutSignal;
  const Fate fate = fate_of(function);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  if (!is_known(signal, context, flags)) return note(unknown_signal(function));
  if (dtype < 0 || dtype >= ncclNumTypes || (source == nullptr && count > 0)) {
    return note(invalid(function, "a null buffer, or dtype " + std::to_string(dtype)));
  }
  return note(put(source, count * size_of(dtype), peer, window, offset, comm, stream, fate));
}

ncclResult_t ncclSignal(int peer, int signal, int context, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream) {
  const Function function = Function::ncclSignal;
  const Fate fate = fate_of(function);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  if (!is_known(signal, context, flags)) return note(unknown_signal(function));
  Task task;
  task.puts.push_back({{nullptr, nullptr, 0}, peer, nullptr});
  return note(submit_one_sided(function, fate, comm, stream, std::move(task)));
}

ncclResult_t ncclWaitSignal(int num_awaited, ncclWaitSignalDesc_t* awaited, ncclComm_t comm,
                            cudaStream_t stream) {
  const Function function = Function::ncclWaitSignal;
  const Fate fate = fate_of(function);
  if (fate.failure != ncclSuccess) return note(fate.failure);
  if (num_awaited < 0 || (num_awaited > 0 && awaited == nullptr)) {
    return note(invalid(function, std::to_string(num_awaited) + " descriptions"));
  }
  Task task;
  for (int i = 0; i < num_awaited; ++i) {
    const ncclWaitSignalDesc_t& each = awaited[i];
    if (!is_known(each.sigIdx, each.ctx, 0) || each.opCnt < 0) {
      return note(unknown_signal(function));
    }
    task.awaited.push_back({each.peer, static_cast<std::uint64_t>(each.opCnt)});
  }
  return note(submit_one_sided(function, fate, comm, stream, std::move(task)));
}
