#include "cpu/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <system_error>

namespace tritondt {
namespace {

class ProcessNumber {
 public:
  ProcessNumber() {
    number_ = getpid();
    const int error = pthread_atfork(nullptr, nullptr, [] { number_ = getpid(); });
    if (error != 0) {
      throw std::system_error(error, std::generic_category(), "pthread_atfork");
    }
  }

  pid_t get() const { return number_.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<pid_t> number_{0};
};

}  // namespace

pid_t process_number() {
  static const ProcessNumber number;
  return number.get();
}

}  // namespace tritondt
