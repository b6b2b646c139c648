// A libcuda.so.1 whose devices are this machine's memory: CUDA's virtual memory management over
// files without a name, which processes share as they share a GPU's. See README.md.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace fake_cuda;

namespace {

constexpr std::size_t kGranularity = 1 << 21;
constexpr int kDirt = 0xA5;  // what new memory holds until somebody clears it

void* host(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

std::uintptr_t number_of(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream); }

bool is_size(std::size_t size) { return size > 0 && size % kGranularity == 0; }

bool are_sound(const CUmemAllocationProp* properties) {
  static const CUmemAllocationProp none = {};
  return properties != nullptr && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         is_device(properties->location.id) && properties->win32HandleMetaData == nullptr &&
         std::memcmp(&properties->allocFlags, &none.allocFlags, sizeof(none.allocFlags)) == 0;
}

// The device that a descriptor's memory is on; -1 where it is none of ours.
int device_of(int descriptor) {
  char path[64], target[64] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
  int device;
  if (readlink(path, target, sizeof(target) - 1) < 0 ||
      std::sscanf(target, "/memfd:fake_cuda:%d", &device) != 1)
    return -1;
  return device;
}

bool is_reserved(CUdeviceptr address, std::size_t size) {
  const auto after = reservations.upper_bound(address);
  if (after == reservations.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return size <= length && address - start <= length - size;
}

bool is_free(CUdeviceptr address, std::size_t size) {
  for (const auto& [start, mapping] : mappings)
    if (start < address + size && address < start + mapping.size) return false;
  return true;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetAllocationGranularity(std::size_t* granularity,
                                       const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!are_sound(properties) || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                                 option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!are_sound(properties) || !is_size(size) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  char name[32];
  std::snprintf(name, sizeof(name), "fake_cuda:%d", properties->location.id);
  const int file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
    if (file >= 0) close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  void* content = mmap(nullptr, size, PROT_WRITE, MAP_SHARED, file, 0);
  if (content == MAP_FAILED) {
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::memset(content, kDirt, size);
  munmap(content, size);
  allocations[*handle = ++last_handle] = {file, properties->location.id, size};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = allocations.find(handle);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  close(found->second.file);  // what is mapped stays
  allocations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = allocations.find(handle);
  if (found == allocations.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const int made = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
  if (made < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(shareable, &made, sizeof(made));
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto number = reinterpret_cast<std::uintptr_t>(shareable);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || number > INT_MAX)
    return CUDA_ERROR_INVALID_VALUE;
  const int device = device_of(static_cast<int>(number));
  struct stat found;
  if (device < 0 || fstat(static_cast<int>(number), &found) != 0 ||
      !is_size(static_cast<std::size_t>(found.st_size)))
    return CUDA_ERROR_INVALID_VALUE;
  const int made = fcntl(static_cast<int>(number), F_DUPFD_CLOEXEC, 0);
  if (made < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  allocations[*handle = ++last_handle] = {made, device, static_cast<std::size_t>(found.st_size)};
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t size, std::size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (!is_size(size) || alignment != 0 || wanted != 0 || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  // As CUDA's, at a multiple of the granularity, where mmap gives one of 4096 bytes.
  void* found = mmap(nullptr, size + kGranularity, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUdeviceptr start = reinterpret_cast<std::uintptr_t>(found);
  const CUdeviceptr aligned = (start + kGranularity - 1) / kGranularity * kGranularity;
  if (aligned > start) munmap(found, aligned - start);
  const std::size_t rest = start + kGranularity - aligned;
  if (rest > 0) munmap(host(aligned + size), rest);
  reservations[*address = aligned] = size;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = reservations.find(address);
  if (found == reservations.end() || found->second != size || !is_free(address, size))
    return CUDA_ERROR_INVALID_VALUE;
  munmap(host(address), size);
  reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = allocations.find(handle);
  if (found == allocations.end() || found->second.size != size || offset != 0 || flags != 0 ||
      !is_reserved(address, size) || !is_free(address, size))
    return CUDA_ERROR_INVALID_VALUE;
  if (mmap(host(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0) ==
      MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  mappings[address] = {size, found->second.device, false};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = mappings.find(address);
  if (found == mappings.end() || found->second.size != size) return CUDA_ERROR_INVALID_VALUE;
  // The addresses stay reserved, and nobody may read or write there.
  if (mmap(host(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
           -1, 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  mappings.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* access,
                        std::size_t count) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = mappings.find(address);
  if (found == mappings.end() || found->second.size != size || count != 1 ||
      access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(access->location.id) ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  if (strangers.count({access->location.id, found->second.device}) > 0)
    return CUDA_ERROR_INVALID_DEVICE;
  if (mprotect(host(address), size, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_INVALID_VALUE;
  found->second.is_accessible = true;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *stream = reinterpret_cast<CUstream>(++last_stream);
  streams.insert(last_stream);
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t count,
                         CUstream stream) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  const auto found = mappings.find(address);
  if (found == mappings.end() || !found->second.is_accessible || count > found->second.size ||
      streams.count(number_of(stream)) == 0)
    return CUDA_ERROR_INVALID_VALUE;
  std::memset(host(address), value, count);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  return streams.count(number_of(stream)) == 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  const Call call(__func__);
  if (call.result != CUDA_SUCCESS) return call.result;
  return streams.erase(number_of(stream)) == 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
