#include "shared/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

namespace fake_nccl {
namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// What the kernel says of a process: when it started, and a letter for its state.
struct Status {
  std::uint32_t start_time;
  char letter;
};

Status status_of(pid_t process) {
  const Status gone = {0, 'X'};
  const std::string path = "/proc/" + std::to_string(process) + "/stat";
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024] = {};
  if (file.number() < 0 || read(file.number(), text, sizeof text - 1) <= 0) return gone;
  const char* place = std::strrchr(text, ')');  // the name before it may hold anything
  if (place == nullptr) return gone;
  const char letter = place[2];
  for (int field = 2; field < 22; ++field) {
    place = std::strchr(place + 1, ' ');
    if (place == nullptr) return gone;
  }
  return {static_cast<std::uint32_t>(std::strtoull(place, nullptr, 10)), letter};
}

}  // namespace

int make_shared_file(std::size_t num_bytes) {
  const int made = memfd_create("fake_nccl", MFD_CLOEXEC);
  if (made < 0) throw_errno("memfd_create");
  try {
    grow_shared_file(made, num_bytes);
  } catch (...) {
    close(made);
    throw;
  }
  return made;
}

void grow_shared_file(int descriptor, std::size_t num_bytes) {
  if (ftruncate(descriptor, static_cast<off_t>(num_bytes)) != 0) throw_errno("ftruncate");
}

int open_shared_file(pid_t process, int descriptor) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int found = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (found < 0) throw_errno(path);
  return found;
}

SharedMapping::SharedMapping(int descriptor, std::size_t num_bytes) : num_bytes_(num_bytes) {
  void* found = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (found == MAP_FAILED) throw_errno("mmap of shared memory");
  bytes_ = static_cast<char*>(found);
}

SharedMapping::~SharedMapping() { munmap(bytes_, num_bytes_); }

Process Process::self() { return {getpid(), status_of(getpid()).start_time}; }

bool Process::is_alive() const {
  const Status now = status_of(id);
  return now.letter != 'Z' && now.letter != 'X' && now.start_time == start_time;
}

}  // namespace fake_nccl
