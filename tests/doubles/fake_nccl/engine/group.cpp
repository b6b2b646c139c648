#include "engine/group.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "settings/errors.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

struct Group {
  int depth = 0;
  ncclResult_t failure = ncclSuccess;
  std::vector<Issued> calls;
  std::vector<Job> jobs;
};

thread_local Group group_of_thread;

bool blocks(const std::vector<std::shared_ptr<Communicator>>& communicators) {
  return std::all_of(communicators.begin(), communicators.end(),
                     [](const auto& each) { return each->config().is_blocking(); });
}

// Runs without the caller, after the delay that was asked for; its communicators are in progress
// until it has a result.
void run_in_background(Job job) {
  for (const auto& communicator : job.communicators) {
    communicator->begin();
    communicator->set_state(ncclInProgress);
  }
  std::thread([job = std::move(job)]() mutable {
    const auto is_aborted = [&] {
      return std::any_of(job.communicators.begin(), job.communicators.end(),
                         [](const auto& each) { return each->is_aborted(); });
    };
    for (std::int64_t ms = 0; ms < settings().delay_ms && !is_aborted(); ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // Begun even then, so that an id that was given to it is used up.
    const ncclResult_t result = job.work();
    job.work = nullptr;
    for (const auto& communicator : job.communicators) {
      communicator->set_state(result);
      communicator->end();
    }
  }).detach();
}

ncclResult_t run_jobs(std::vector<Job> jobs) {
  const bool all_block = std::all_of(jobs.begin(), jobs.end(),
                                     [](const Job& job) { return blocks(job.communicators); });
  if (!all_block) {
    for (Job& job : jobs) run_in_background(std::move(job));
    return ncclInProgress;
  }
  // Ranks of one process wait for each other.
  std::vector<ncclResult_t> results(jobs.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < jobs.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = jobs[i].work(); });
  }
  results[0] = jobs[0].work();
  for (std::thread& thread : threads) thread.join();
  ncclResult_t first = ncclSuccess;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (results[i] == ncclSuccess) continue;
    if (jobs[i].undo != nullptr) jobs[i].undo();
    if (first == ncclSuccess) first = results[i];
  }
  return first;
}

// A rank that sends to itself must receive from itself in the same group.
bool meets_itself(const std::vector<Issued>& calls) {
  std::int64_t balance = 0;
  for (const Issued& call : calls) {
    const int rank = call.communicator->rank();
    for (const Message& message : call.task.sends) balance += message.peer == rank ? 1 : 0;
    for (const Message& message : call.task.receives) balance -= message.peer == rank ? 1 : 0;
  }
  return balance == 0;
}

// Collectives go before messages, so that all ranks have the same order whatever that of the calls.
bool goes_first(const Issued& call) {
  const Task& task = call.task;
  const bool is_message =
      (!task.sends.empty() && task.sends[0].tag.collective == Collective::kMessage) ||
      (!task.receives.empty() && task.receives[0].tag.collective == Collective::kMessage);
  return !is_message && task.puts.empty() && task.awaited.empty();
}

bool is_of_messages(const Message& message) {
  switch (message.tag.collective) {
    case Collective::kMessage:
    case Collective::kAlltoAll:
    case Collective::kGather:
    case Collective::kScatter:
      return true;
    default:
      return false;
  }
}

// NCCL's queues of messages outlive a simulated group: each later one takes as many as it has from
// their fronts, so that its own are behind those simulated.
void keep_simulated(const Issued& call) {
  call.communicator->with_possessions([&](Possessions* possessions) {
    for (const Message& message : call.task.sends) {
      if (is_of_messages(message)) possessions->simulated_sends[message.peer].push_back(message);
    }
    for (const Message& message : call.task.receives) {
      if (is_of_messages(message)) possessions->simulated_receives[message.peer].push_back(message);
    }
  });
}

void take_turns(std::map<int, std::deque<Message>>* simulated, std::vector<Message>* own) {
  for (Message& message : *own) {
    const auto found = simulated->find(message.peer);
    if (found == simulated->end() || !is_of_messages(message)) continue;
    found->second.push_back(message);
    message = found->second.front();
    found->second.pop_front();
  }
}

void queue_behind_simulated(Issued* call) {
  call->communicator->with_possessions([&](Possessions* possessions) {
    take_turns(&possessions->simulated_sends, &call->task.sends);
    take_turns(&possessions->simulated_receives, &call->task.receives);
  });
}

ncclResult_t run_calls(std::vector<Issued> calls) {
  for (Issued& call : calls) queue_behind_simulated(&call);
  // One operation for each communicator, in the order in which they were first used.
  std::vector<std::vector<Issued>> operations;
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (Issued& call : calls) {
    const auto found = std::find(communicators.begin(), communicators.end(), call.communicator);
    const auto index = static_cast<std::size_t>(found - communicators.begin());
    if (found == communicators.end()) {
      communicators.push_back(call.communicator);
      operations.emplace_back();
    }
    operations[index].push_back(std::move(call));
  }
  for (std::vector<Issued>& operation : operations) {
    if (!meets_itself(operation)) {
      return failed(ncclInvalidUsage,
                    "a rank sends to itself and receives from itself not as often in one group");
    }
    std::stable_partition(operation.begin(), operation.end(), goes_first);
  }
  if (blocks(communicators) || settings().delay_ms == 0) {
    for (std::vector<Issued>& operation : operations) launch(std::move(operation));
    return ncclSuccess;
  }
  auto waiting = std::make_shared<std::vector<std::vector<Issued>>>(std::move(operations));
  run_in_background({communicators,
                     [waiting] {
                       for (std::vector<Issued>& each : *waiting) launch(std::move(each));
                       return ncclSuccess;
                     },
                     nullptr});
  return ncclInProgress;
}

}  // namespace

ncclResult_t submit(Issued call) {
  if (group_of_thread.depth > 0) {
    group_of_thread.calls.push_back(std::move(call));
    return ncclSuccess;
  }
  std::vector<Issued> alone;
  alone.push_back(std::move(call));
  return run_calls(std::move(alone));
}

ncclResult_t submit(Job job) {
  if (group_of_thread.depth > 0) {
    group_of_thread.jobs.push_back(std::move(job));
    return ncclSuccess;
  }
  std::vector<Job> alone;
  alone.push_back(std::move(job));
  return run_jobs(std::move(alone));
}

ncclResult_t note(ncclResult_t result) {
  const bool is_failure = result != ncclSuccess && result != ncclInProgress;
  if (is_failure && group_of_thread.depth > 0) group_of_thread.failure = result;
  return result;
}

void start_group() { ++group_of_thread.depth; }

ncclResult_t end_group() {
  if (group_of_thread.depth == 0) return failed(ncclInvalidUsage, "no group has been started");
  if (--group_of_thread.depth > 0) return ncclSuccess;
  Group ended;
  std::swap(ended, group_of_thread);
  if (!ended.jobs.empty() && !ended.calls.empty()) {
    ended.failure = failed(ncclInvalidUsage, "a group makes communicators or uses them, not both");
  }
  if (ended.failure != ncclSuccess) {
    for (const Job& job : ended.jobs) {
      if (job.undo != nullptr) job.undo();
    }
    return ended.failure;
  }
  if (!ended.jobs.empty()) return run_jobs(std::move(ended.jobs));
  return ended.calls.empty() ? ncclSuccess : run_calls(std::move(ended.calls));
}

ncclResult_t simulate_group(float* estimated_us) {
  if (group_of_thread.depth == 0) return failed(ncclInvalidUsage, "no group has been started");
  *estimated_us = -1;
  for (const Issued& call : group_of_thread.calls) {
    if (call.estimated_us >= 0) *estimated_us = call.estimated_us;
    keep_simulated(call);
  }
  if (--group_of_thread.depth > 0) return ncclSuccess;
  Group ended;
  std::swap(ended, group_of_thread);
  return ended.failure;
}

}  // namespace fake_nccl
