#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tritondt {

// Shared memory of one rank: made by it, mapped by the other ranks of its machine.
//
// The memory has no name, and is freed with the last process that has it mapped. It takes pages as
// they are written, and its length is sealed: no process can take pages away that another one
// reads. A forked child does not inherit the mapping.
class Arena {
 public:
  // New memory of `num_bytes` zeros. Throws std::system_error, as `Arena(path, num_bytes)` does.
  explicit Arena(std::size_t num_bytes);
  // The memory of another process, by the path of its descriptor in /proc. Throws
  // std::invalid_argument for memory of another length, or one whose length may change.
  Arena(const std::string& path, std::size_t num_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* base() const { return base_; }
  std::size_t num_bytes() const { return num_bytes_; }

  // The descriptor by which others map the memory; -1 once closed.
  int descriptor() const { return descriptor_; }
  void close_descriptor();

  // Unmaps the memory; again, or in a forked child: does nothing.
  void unmap();

 private:
  void map();

  std::int64_t process_;
  std::size_t num_bytes_;
  int descriptor_;
  char* base_ = nullptr;
};

}  // namespace tritondt
