// What the double of libcuda knows: devices, and memory that is made, reserved and mapped.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace fake_cuda {

struct Allocation {
  int file;
  int device;
  std::size_t size;
};
struct Mapping {
  std::size_t size;
  int device;  // of the memory
  bool is_accessible;
};
struct Failure {
  int calls_left;
  CUresult result;
};

inline std::mutex mutex;
inline int num_devices = 2;
inline std::set<std::pair<int, int>> without_atomics;  // device and peer joined by PCIe, say
inline std::set<std::pair<int, int>> strangers;  // device and peer that cannot reach each other
inline std::map<std::pair<int, int>, int> attributes;
inline std::map<std::string, Failure> failures;
inline CUmemGenericAllocationHandle last_handle = 0x1000;  // handles are never used twice
inline std::map<CUmemGenericAllocationHandle, Allocation> allocations;
inline std::map<CUdeviceptr, std::size_t> reservations;
inline std::map<CUdeviceptr, Mapping> mappings;
inline std::uintptr_t last_stream = 0x100;  // no number is used twice
inline std::set<std::uintptr_t> streams;

inline bool is_device(int device) { return device >= 0 && device < num_devices; }

// Holds the lock; `result` is what a test has asked this call to return, or success.
struct Call {
  explicit Call(const char* name) : lock(mutex) {
    const auto found = failures.find(name);
    if (found != failures.end() && --found->second.calls_left == 0) {
      result = found->second.result;
      failures.erase(found);
    }
  }
  std::lock_guard<std::mutex> lock;
  CUresult result = CUDA_SUCCESS;
};

}  // namespace fake_cuda
