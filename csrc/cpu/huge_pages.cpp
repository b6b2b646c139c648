#include "cpu/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tritondt {

void advise_huge_pages([[maybe_unused]] std::uintptr_t address,
                       [[maybe_unused]] std::int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = (address + page - 1) / page * page;
  const std::uintptr_t last = (address + static_cast<std::uintptr_t>(num_bytes)) / page * page;
  // EINVAL where the kernel was built without huge pages: the hint is lost, the memory is as good.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace tritondt
