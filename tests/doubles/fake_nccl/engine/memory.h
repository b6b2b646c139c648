#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "interface/nccl_abi.h"
#include "shared/shared_file.h"

namespace fake_nccl {

class Communicator;

// Where memory that this process can share lies in its file.
struct SharedPlace {
  int descriptor;
  std::size_t offset;
  std::size_t file_bytes;
};

// Memory as of ncclMemAlloc: whole pages of a file of its own. Throws std::system_error.
void* allocate(std::size_t num_bytes);
// False where it is not the start of such memory.
bool release(void* pointer);
// Whether a communicator has registered some of the memory that starts there.
bool is_registered(const void* pointer);
std::optional<SharedPlace> find_shared(const void* pointer, std::size_t num_bytes);
int num_allocations();

// Memory that a communicator knows, and that must not be freed as long.
class Registration {
 public:
  explicit Registration(const void* buffer);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const char* const start_;
};

// Memory of every rank that all of them can reach.
class Window {
 public:
  // Where the memory of `rank` lies in this process; nullptr where it is not all in there.
  void* at(int rank, std::size_t offset, std::size_t num_bytes = 0) const;
  // Whether bytes of this process lie in the memory of `rank`.
  bool holds(int rank, const void* bytes, std::size_t num_bytes) const;
  int num_ranks() const { return static_cast<int>(views_.size()); }
  int own_rank() const { return own_rank_; }

  // Made by all ranks together. No window, and success, where one of them has no symmetric memory.
  static ncclResult_t make(Communicator* communicator, void* buffer, std::size_t num_bytes,
                           std::shared_ptr<Window>* made);

 private:
  struct View {
    char* bytes;
    std::size_t num_bytes;
    std::unique_ptr<SharedMapping> mapping;  // of another rank's file
  };
  std::vector<View> views_;
  int own_rank_ = 0;
};

}  // namespace fake_nccl
