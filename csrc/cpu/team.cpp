#include "cpu/team.h"

#include <dlfcn.h>

#include <system_error>
#include <thread>

#include "cpu/process.h"

namespace tritondt {
namespace {

// How a compiler calls OpenMP for a parallel region; GNU's library has it, and LLVM's and Intel's
// for its sake.
using ParallelRegion = void (*)(void (*work)(void*), void* data, unsigned num_threads,
                                unsigned flags);

// Looked up among what libtorch_cpu itself depends on, whatever its OpenMP is called.
ParallelRegion find_parallel_region() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return nullptr;
  const auto found = reinterpret_cast<ParallelRegion>(dlsym(torch, "GOMP_parallel"));
  dlclose(torch);  // it stays loaded: NOLOAD has counted a use, no more
  return found;
}

const pid_t process_that_loaded = process_number();

ParallelRegion parallel_region() {
  static const ParallelRegion found = find_parallel_region();
  return process_number() == process_that_loaded ? found : nullptr;
}

// A machine that refuses a thread has the work done by those that there are.
void run_on_own_threads(std::int64_t num_members, void (*work)(void* data), void* data) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(num_members - 1));
  try {
    for (std::int64_t member = 1; member < num_members; ++member) threads.emplace_back(work, data);
  } catch (const std::system_error&) {
  }
  work(data);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TeamOrigin team_origin() {
  return parallel_region() != nullptr ? TeamOrigin::kTorch : TeamOrigin::kOwn;
}

void run_on_team(std::int64_t num_members, void (*work)(void* data), void* data) {
  if (const ParallelRegion region = parallel_region()) {
    region(work, data, static_cast<unsigned>(num_members), 0);
  } else {
    run_on_own_threads(num_members, work, data);
  }
}

}  // namespace tritondt
