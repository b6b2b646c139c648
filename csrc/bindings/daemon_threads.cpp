#include "bindings/daemon_threads.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <mutex>

namespace tritondt {
namespace {

thread_local bool stays_at_exit = false;
std::terminate_handler handler_before = nullptr;

bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// A thread that asks for the GIL when the interpreter is ending is ended by Python up to 3.13, with
// pthread_exit. Its unwinding comes through destructors that may not throw, as that of
// pybind11::gil_scoped_release, which is std::terminate. From 3.14 on Python itself holds it there.
[[noreturn]] void stay_or_terminate() {
  while (stays_at_exit && is_ending()) pause();
  handler_before();
  std::abort();
}

void stay_at_exit() {
  static std::once_flag installed;
  std::call_once(installed, [] {
    handler_before = std::get_terminate();
    std::set_terminate(stay_or_terminate);
  });
  stays_at_exit = true;
}

}  // namespace

void bind_daemon_threads(pybind11::module_* module) {
  module->def(
      "stay_at_exit", &stay_at_exit,
      "Lets the calling thread stay where it is when it comes back from C++ to an interpreter "
      "that is ending, which otherwise aborts the process.");
}

}  // namespace tritondt
