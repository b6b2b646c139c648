#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace fake_nccl {

// A descriptor that is closed at the end of the block.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// Files without a name, which are gone when the last process that has them is. Others reach one
// through /proc, by a process that has it open and its descriptor there. All throw
// std::system_error; the descriptors returned are the caller's to close.
int make_shared_file(std::size_t num_bytes);
void grow_shared_file(int descriptor, std::size_t num_bytes);
int open_shared_file(pid_t process, int descriptor);

class SharedMapping {
 public:
  SharedMapping(int descriptor, std::size_t num_bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  char* bytes() const { return bytes_; }

 private:
  char* bytes_;
  std::size_t num_bytes_;
};

// A process, told from a later one of the same number; small enough for an atomic without a lock.
// Zero is nobody.
struct Process {
  pid_t id;
  std::uint32_t start_time;  // the low half of it, in ticks

  static Process self();
  // False from the moment the process has ended, whether or not its parent has asked.
  bool is_alive() const;
};

}  // namespace fake_nccl
