#pragma once

#include <cstdio>
#include <cstdlib>

// Like assert, but there in every build.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

void check_copies();
void check_line_writer();
void check_sweeps();
void check_casts();
void check_reductions();
void check_socket_groups();
void check_arena_groups();
void check_recorder();
void check_watchdog();
void check_nccl();
