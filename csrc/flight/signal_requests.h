#pragma once

#include <signal.h>

namespace tritondt {

// Signals that ask for something, noted by a handler and read by a thread; one owner per signal.

// A descriptor that is readable after a signal, the same for the life of the process.
int signal_requests_fd();

// Installs the noting handler where `signum` has its default disposition, or LLVM's; else false.
// Throws std::invalid_argument where `signum` cannot be handled.
bool note_signal(int signum, struct sigaction* before);

// Installs it again where LLVM has taken the signal since.
void keep_signal(int signum);

// Restores what was there, unless something else has been installed since.
void forget_signal(int signum, const struct sigaction& before);

// Empties the descriptor; call it before `take_signal`.
void clear_signal_requests();

// Whether `signum` came since the last call.
bool take_signal(int signum);

}  // namespace tritondt
