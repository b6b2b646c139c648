#include "api/api.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "api/stream_handles.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "interface/fake_api.h"

namespace fake_nccl {

ncclResult_t enter(Function function) {
  const Fate fate = fate_of(function);
  while (fate.stalls) std::this_thread::sleep_for(std::chrono::hours(1));
  if (fate.async_error != ncclSuccess) {
    return invalid(function, "it runs nothing that could meet an asynchronous error");
  }
  return fate.failure;
}

std::shared_ptr<Communicator> find_communicator(ncclComm_t handle) {
  auto found = Registry<Communicator>::all().find(handle);
  if (found == nullptr) {
    failed(ncclInvalidArgument, "there is no such communicator in this process, or no longer");
  }
  return found;
}

std::shared_ptr<Communicator> find_ready(ncclComm_t handle, ncclResult_t* result) {
  auto found = find_communicator(handle);
  *result = found == nullptr ? ncclInvalidArgument : found->ready();
  return *result == ncclSuccess ? found : nullptr;
}

ncclResult_t find_place(Function function, ncclComm_t comm, cudaStream_t stream, Issued* issued) {
  ncclResult_t result;
  issued->communicator = find_ready(comm, &result);
  if (issued->communicator == nullptr) return result;
  if (issued->communicator->is_revoked()) {
    return failed(ncclInvalidUsage,
                  std::string(name_of(function)) + ": the communicator is revoked");
  }
  issued->stream = find_stream(stream);
  if (issued->stream == nullptr) return invalid(function, "there is no such stream");
  if (stream != nullptr && issued->stream->device() != issued->communicator->device()) {
    return failed(ncclUnhandledCudaError,
                  std::string(name_of(function)) + ": the stream is of device " +
                      std::to_string(issued->stream->device()) + ", the communicator of device " +
                      std::to_string(issued->communicator->device()));
  }
  return ncclSuccess;
}

ncclResult_t invalid(Function function, const std::string& text) {
  return failed(ncclInvalidArgument, std::string(name_of(function)) + ": " + text);
}

}  // namespace fake_nccl

using namespace fake_nccl;

ncclResult_t ncclGetVersion(int* version) {
  const ncclResult_t entered = enter(Function::ncclGetVersion);
  if (entered != ncclSuccess) return entered;
  if (version == nullptr) return invalid(Function::ncclGetVersion, "the pointer is null");
  *version = settings().version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {
      "fake NCCL: success",        "fake NCCL: CUDA error",       "fake NCCL: system error",
      "fake NCCL: internal error", "fake NCCL: invalid argument", "fake NCCL: invalid usage",
      "fake NCCL: remote error",   "fake NCCL: in progress",      "fake NCCL: timeout",
  };
  const auto index = static_cast<std::size_t>(result);
  return index < std::size(kTexts) ? kTexts[index] : "fake NCCL: unknown result";
}

const char* ncclGetLastError(ncclComm_t) { return last_error(); }

ncclResult_t fakeCommConfig(ncclComm_t comm, ncclConfig_t* config) {
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  *config = found->config().values();
  return ncclSuccess;
}

ncclResult_t fakeCommCallConfig(ncclComm_t comm, ncclCollConfig_t* config) {
  const auto found = find_communicator(comm);
  if (found == nullptr) return ncclInvalidArgument;
  found->with_possessions([&](Possessions* possessions) { *config = possessions->call_config; });
  return ncclSuccess;
}

ncclResult_t fakeCountJoined(const ncclUniqueId* id, int* count) {
  try {
    *count = Segment::num_joined(*id);
    return ncclSuccess;
  } catch (const std::runtime_error& error) {
    return failed(ncclInvalidArgument, std::string("fakeCountJoined: ") + error.what());
  }
}

ncclResult_t fakeCountObjects(int* communicators, int* streams, int* events, int* allocations) {
  *communicators = Registry<Communicator>::all().size();
  *streams = Registry<HostStream>::all().size();
  *events = Registry<HostEvent>::all().size();
  *allocations = num_allocations();
  return ncclSuccess;
}
