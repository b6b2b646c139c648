// Drives everything in csrc that needs no Python; built with sanitizers by `make sanitize`.
#include <chrono>
#include <cstdio>

#include "check.h"

int main() {
  const struct {
    const char* name;
    void (*run)();
  } parts[] = {{"copies", check_copies},
               {"line writer", check_line_writer},
               {"sweeps", check_sweeps},
               {"casts", check_casts},
               {"reductions", check_reductions},
               {"socket groups", check_socket_groups},
               {"arena groups", check_arena_groups},
               {"flight recorder", check_recorder},
               {"NCCL", check_nccl},
               {"watchdog", check_watchdog}};
  for (const auto& part : parts) {
    const auto started = std::chrono::steady_clock::now();
    part.run();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    std::printf("%s: %.1f s\n", part.name, taken.count());
    std::fflush(stdout);
  }
  return 0;
}
