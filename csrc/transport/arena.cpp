#include "transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "cpu/process.h"

namespace tritondt {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Arena::Arena(std::size_t num_bytes)
    : process_(process_number()),
      num_bytes_(num_bytes),
      descriptor_(memfd_create("tritondt", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (descriptor_ < 0) fail("memfd_create");
  try {
    if (ftruncate(descriptor_, static_cast<off_t>(num_bytes)) != 0) fail("ftruncate");
    if (fcntl(descriptor_, F_ADD_SEALS, kSeals) != 0) fail("F_ADD_SEALS");
    map();
  } catch (...) {
    close_descriptor();
    throw;
  }
}

Arena::Arena(const std::string& path, std::size_t num_bytes)
    : process_(process_number()),
      num_bytes_(num_bytes),
      descriptor_(open(path.c_str(), O_RDWR | O_CLOEXEC)) {
  if (descriptor_ < 0) fail(path.c_str());
  try {
    struct stat found = {};
    if (fstat(descriptor_, &found) != 0) fail(path.c_str());
    const int seals = fcntl(descriptor_, F_GET_SEALS);
    if (found.st_size != static_cast<off_t>(num_bytes) || seals < 0 || (seals & kSeals) != kSeals) {
      throw std::invalid_argument(path + " is no sealed memory of " + std::to_string(num_bytes) +
                                  " bytes");
    }
    map();
  } catch (...) {
    close_descriptor();
    throw;
  }
  close_descriptor();
}

Arena::~Arena() {
  close_descriptor();
  unmap();
}

void Arena::map() {
  void* const found =
      mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor_, 0);
  if (found == MAP_FAILED) fail("mmap");
  base_ = static_cast<char*>(found);
  // A child that lives long would keep the memory, and could do nothing with it.
  if (madvise(found, num_bytes_, MADV_DONTFORK) != 0) {
    const int error = errno;
    unmap();
    errno = error;
    fail("MADV_DONTFORK");
  }
  // EINVAL where the kernel was built without huge pages: the hint is lost, the memory is as good.
  madvise(found, num_bytes_, MADV_HUGEPAGE);
}

void Arena::close_descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void Arena::unmap() {
  if (base_ == nullptr || process_number() != process_) return;
  munmap(base_, num_bytes_);
  base_ = nullptr;
}

}  // namespace tritondt
