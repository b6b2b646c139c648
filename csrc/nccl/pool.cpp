#include "nccl/pool.h"

#include <cstddef>
#include <cstdio>
#include <mutex>

namespace tritondt::nccl {
namespace {

// Never destroyed: torch frees its pools after everything else.
struct Server {
  std::mutex guard;
  std::shared_ptr<const Api> api;
};

Server& server() {
  static auto* made = new Server;
  return *made;
}

std::shared_ptr<const Api> serving() {
  const std::lock_guard<std::mutex> lock(server().guard);
  if (server().api != nullptr) return server().api;
  throw Error(kPoolAllocate, "memory of NCCL was asked for, and no library serves it yet");
}

}  // namespace

void serve_pool(const std::shared_ptr<const Api>& api) {
  api->ncclMemAlloc.require();
  const std::lock_guard<std::mutex> lock(server().guard);
  std::shared_ptr<const Api>& now = server().api;
  if (now != nullptr && now->library().path() != api->library().path()) {
    throw Error(kPoolAllocate, api->library().description() + " was to serve memory; " +
                                   now->library().description() +
                                   " does so in this process already");
  }
  now = api;
}

}  // namespace tritondt::nccl

using tritondt::nccl::Api;

extern "C" {

[[gnu::visibility("default")]] void* tritondt_nccl_allocate(std::size_t num_bytes, int /*device*/,
                                                            void* /*stream*/) {
  const std::shared_ptr<const Api> api = tritondt::nccl::serving();
  void* address = nullptr;
  api->call(api->ncclMemAlloc, &address, num_bytes);
  return address;
}

[[gnu::visibility("default")]] void tritondt_nccl_free(void* address, std::size_t /*num_bytes*/,
                                                       int /*device*/, void* /*stream*/) {
  try {
    const std::shared_ptr<const Api> api = tritondt::nccl::serving();
    api->call(api->ncclMemFree, address);
  } catch (const tritondt::nccl::Error& error) {
    std::fprintf(stderr, "tritondt: memory was not freed: %s\n", error.what());
  }
}

}  // extern "C"
