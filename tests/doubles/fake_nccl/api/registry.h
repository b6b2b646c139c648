#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace fake_nccl {

// A handle that nothing had before, of whatever kind, so that one that is no longer in use, or is
// of another kind, is always found out.
inline void* new_handle() {
  static std::atomic<std::uintptr_t> latest{0x10000};
  return reinterpret_cast<void*>(latest.fetch_add(16));
}

// What handles stand for. One that is no longer in use stands for nothing, where a real library
// would read freed memory; so does one of the process that this one was forked from. Never
// destroyed: threads of streams outlive static objects.
template <typename Object>
class Registry {
 public:
  static Registry& all() {
    static Registry* const made = new Registry;
    return *made;
  }

  void* add(std::shared_ptr<Object> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    void* handle = new_handle();
    entries_[handle] = {std::move(object), getpid()};
    return handle;
  }

  std::shared_ptr<Object> find(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(handle);
    return found == entries_.end() || found->second.process != getpid() ? nullptr
                                                                        : found->second.object;
  }

  void remove(const void* handle) {
    std::shared_ptr<Object> removed;  // goes after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(handle);
    if (found == entries_.end()) return;
    removed = std::move(found->second.object);
    entries_.erase(found);
  }

  int size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(entries_.size());
  }

 private:
  struct Entry {
    std::shared_ptr<Object> object;
    pid_t process;
  };
  std::mutex mutex_;
  std::map<const void*, Entry> entries_;
};

}  // namespace fake_nccl
