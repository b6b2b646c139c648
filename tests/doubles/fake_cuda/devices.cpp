// Devices of the double of libcuda, and what a test asks of it.
#include <climits>
#include <cstdint>
#include <cstring>

#include "state.h"

using namespace fake_cuda;

#pragma GCC visibility push(default)
extern "C" {

// What a test asks for.
int fakeCudaLive() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(allocations.size() + reservations.size() + mappings.size() +
                          streams.size());
}
void fakeCudaFail(const char* name, int n, int result) {  // n = 0: no more
  const std::lock_guard<std::mutex> lock(mutex);
  failures.erase(name);
  if (n > 0) failures[name] = {n, static_cast<CUresult>(result)};
}
void fakeCudaDevices(int n) {
  const std::lock_guard<std::mutex> lock(mutex);
  num_devices = n;
}
void fakeCudaAtomics(int device, int peer, int can) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (can != 0)
    without_atomics.erase({device, peer});
  else
    without_atomics.insert({device, peer});
}

void fakeCudaPeer(int device, int peer, int can) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (can)
    strangers.erase({device, peer});
  else
    strangers.insert({device, peer});
}
void fakeCudaAttribute(int device, int attribute, int value) {
  const std::lock_guard<std::mutex> lock(mutex);
  attributes[{device, attribute}] = value;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  static const std::map<CUresult, const char*> texts = {
      {CUDA_SUCCESS, "no error"},
      {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
      {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
      {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
      {CUDA_ERROR_NOT_SUPPORTED, "operation not supported"}};
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = texts.find(error);
  *text = found == texts.end() ? nullptr : found->second;
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  *count = num_devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED &&
      attribute != CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    return CUDA_ERROR_INVALID_VALUE;
  const auto found = attributes.find({device, attribute});
  *value = found == attributes.end() ? 1 : found->second;
  return CUDA_SUCCESS;
}

// cuda.h makes it cuDeviceGetUuid_v2, which drivers before CUDA 11.4 lack.
#ifdef FAKE_CUDA_OLD
#undef cuDeviceGetUuid
#endif
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(i == 15 ? device : 0xF0 + i);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && strangers.count({device, peer}) == 0;  // as CUDA says of a device itself
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice source,
                                 CUdevice target) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_device(source) || !is_device(target)) return CUDA_ERROR_INVALID_DEVICE;
  if (source == target || attribute != CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
    return CUDA_ERROR_INVALID_VALUE;
  *value = without_atomics.count({source, target}) == 0;
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
