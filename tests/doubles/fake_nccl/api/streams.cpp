#include <cstring>
#include <memory>
#include <string>

#include "api/registry.h"
#include "api/stream_handles.h"
#include "engine/launch.h"
#include "interface/fake_api.h"
#include "settings/errors.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

thread_local int device_of_thread = 0;

ncclResult_t no_such(const char* call, const char* what) {
  return failed(ncclInvalidArgument, std::string(call) + ": there is no such " + what);
}

ncclResult_t progress(bool is_over) { return is_over ? ncclSuccess : ncclInProgress; }

}  // namespace

std::shared_ptr<HostStream> find_stream(cudaStream_t handle) {
  if (handle != nullptr) return Registry<HostStream>::all().find(handle);
  // Never destroyed, as it may run something when the process ends.
  static auto* const everyones = new std::shared_ptr<HostStream>(std::make_shared<HostStream>(0));
  return *everyones;
}

std::shared_ptr<HostEvent> find_event(cudaEvent_t handle) {
  return Registry<HostEvent>::all().find(handle);
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

}  // namespace fake_nccl

using namespace fake_nccl;

ncclResult_t fakeSet(const char* name, const char* value) {
  if (set(name, value)) return ncclSuccess;
  return failed(ncclInvalidArgument, std::string(name) + "=" + value + " is not understood");
}

ncclResult_t fakeCapture(int is_under_way) {
  capture(is_under_way != 0);
  return ncclSuccess;
}

ncclResult_t fakeDestroyGraphs() {
  destroy_graphs();
  return ncclSuccess;
}

ncclResult_t fakeSetDevice(int device) {
  if (device < 0) return no_such("fakeSetDevice", "device");
  set_current_device(device);
  return ncclSuccess;
}

ncclResult_t fakeGetDevice(int* device) {
  *device = current_device();
  return ncclSuccess;
}

ncclResult_t fakeStreamCreate(cudaStream_t* stream) {
  auto made = std::make_shared<HostStream>(current_device());
  *stream = static_cast<cudaStream_t>(Registry<HostStream>::all().add(std::move(made)));
  return ncclSuccess;
}

ncclResult_t fakeStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr || find_stream(stream) == nullptr)
    return no_such("fakeStreamDestroy", "stream");
  Registry<HostStream>::all().remove(stream);
  return ncclSuccess;
}

ncclResult_t fakeStreamDevice(cudaStream_t stream, int* device) {
  const auto found = find_stream(stream);
  if (found == nullptr) return no_such("fakeStreamDevice", "stream");
  *device = found->device();
  return ncclSuccess;
}

ncclResult_t fakeStreamLaunch(cudaStream_t stream, void (*operation)(void*), void* argument) {
  const auto found = find_stream(stream);
  if (found == nullptr) return no_such("fakeStreamLaunch", "stream");
  found->enqueue([operation, argument] { operation(argument); });
  return ncclSuccess;
}

ncclResult_t fakeStreamCopy(cudaStream_t stream, void* target, const void* source,
                            std::size_t num_bytes) {
  const auto found = find_stream(stream);
  if (found == nullptr) return no_such("fakeStreamCopy", "stream");
  found->enqueue([=] { std::memcpy(target, source, num_bytes); });
  return ncclSuccess;
}

ncclResult_t fakeStreamSynchronize(cudaStream_t stream) {
  const auto found = find_stream(stream);
  if (found == nullptr) return no_such("fakeStreamSynchronize", "stream");
  found->mark()->wait();
  return ncclSuccess;
}

ncclResult_t fakeStreamQuery(cudaStream_t stream) {
  const auto found = find_stream(stream);
  return found == nullptr ? no_such("fakeStreamQuery", "stream") : progress(found->is_idle());
}

ncclResult_t fakeEventCreate(cudaEvent_t* event) {
  auto made = std::make_shared<HostEvent>();
  *event = static_cast<cudaEvent_t>(Registry<HostEvent>::all().add(std::move(made)));
  return ncclSuccess;
}

ncclResult_t fakeEventDestroy(cudaEvent_t event) {
  if (find_event(event) == nullptr) return no_such("fakeEventDestroy", "event");
  Registry<HostEvent>::all().remove(event);
  return ncclSuccess;
}

ncclResult_t fakeEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto found = find_event(event);
  const auto recorded = find_stream(stream);
  if (found == nullptr) return no_such("fakeEventRecord", "event");
  if (recorded == nullptr) return no_such("fakeEventRecord", "stream");
  found->record(recorded.get());
  return ncclSuccess;
}

ncclResult_t fakeStreamWaitEvent(cudaStream_t stream, cudaEvent_t event) {
  const auto found = find_event(event);
  const auto held = find_stream(stream);
  if (found == nullptr) return no_such("fakeStreamWaitEvent", "event");
  if (held == nullptr) return no_such("fakeStreamWaitEvent", "stream");
  found->hold(held.get());
  return ncclSuccess;
}

ncclResult_t fakeEventSynchronize(cudaEvent_t event) {
  const auto found = find_event(event);
  if (found == nullptr) return no_such("fakeEventSynchronize", "event");
  found->wait();
  return ncclSuccess;
}

ncclResult_t fakeEventQuery(cudaEvent_t event) {
  const auto found = find_event(event);
  return found == nullptr ? no_such("fakeEventQuery", "event") : progress(found->is_over());
}
