#include "engine/launch.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "engine/exchange.h"
#include "settings/settings.h"

namespace fake_nccl {
namespace {

// What runs in a stream: the tasks of one group on one communicator.
class Operation {
 public:
  Operation(std::shared_ptr<Communicator> communicator, std::vector<Task> tasks)
      : communicator_(std::move(communicator)), tasks_(std::move(tasks)) {}

  // Nothing of the user's is touched any more once the communicator was stopped.
  void run() {
    for (Task& task : tasks_) {
      if (task.scaling.has_value()) scale(*task.scaling);
    }
    if (!exchange_messages()) return;
    for (const Task& task : tasks_) {
      for (const Copy& copy : task.copies) copy_bytes(copy);
      if (task.reduction.has_value()) reduce(*task.reduction);
    }
    for (const Task& task : tasks_) {
      for (const Put& put : task.puts) give(put);
      for (const Awaited& awaited : task.awaited) {
        if (!take(awaited)) return;
      }
    }
  }

 private:
  static void copy_bytes(const Copy& copy) {
    if (copy.num_bytes > 0) std::memmove(copy.target, copy.source, copy.num_bytes);
  }

  bool exchange_messages() {
    Communicator& here = *communicator_;
    Exchange exchange(here.segment(), Channel::kData, here.rank(), here.num_ranks());
    bool stalls = false;
    for (const Task& task : tasks_) {
      for (const Message& message : task.sends) exchange.send(message);
      for (const Message& message : task.receives) exchange.receive(message);
      stalls = stalls || task.fate.stalls;
      if (task.fate.async_error != ncclSuccess) {
        here.report(task.fate.async_error, "injected asynchronous error");
      }
    }
    return drive([&] {
      // After an error what runs on a device never ends by itself.
      if (stalls || has_failed()) return Progress::kBlocked;
      const Progress progress = exchange.advance();
      if (progress == Progress::kBlocked) {
        here.has_lost_peer(here.all_ranks(), [&] { return exchange.advance_and_await(); });
      }
      if (!exchange.mismatch().empty() && settings().reports_mismatches) {
        here.report(ncclInvalidUsage, exchange.mismatch());
      }
      return progress;
    });
  }

  bool drive(const std::function<Progress()>& advance) {
    return communicator_->drive(advance, [this] { return communicator_->is_stopped(); });
  }

  bool has_failed() const {
    const ncclResult_t state = communicator_->state();
    return state != ncclSuccess && state != ncclInProgress;
  }

  void give(const Put& put) {
    copy_bytes(put.copy);
    Segment* segment = communicator_->segment();
    segment->signals(communicator_->rank(), put.peer).fetch_add(1);
    segment->slot(put.peer).doorbell.ring();
  }

  bool take(const Awaited& awaited) {
    const auto peer = static_cast<std::size_t>(awaited.peer);
    const std::uint64_t goal = communicator_->with_possessions([&](Possessions* possessions) {
      return possessions->num_signals_taken[peer] += awaited.num_signals;
    });
    const auto is_there = [&] {
      return communicator_->segment()->signals(awaited.peer, communicator_->rank()) >= goal;
    };
    return drive([&] {
      if (has_failed()) return Progress::kBlocked;
      if (is_there()) return Progress::kDone;
      communicator_->has_lost_peer(communicator_->all_ranks(), [&] {
        return is_there() ? std::vector<int>() : std::vector<int>{awaited.peer};
      });
      return Progress::kBlocked;
    });
  }

  std::shared_ptr<Communicator> communicator_;
  std::vector<Task> tasks_;
};

// Two threads that launch on the same streams must not find them in different orders.
std::mutex& launching() {
  static std::mutex* const made = new std::mutex;
  return *made;
}

struct Graphs {
  bool is_under_way = false;
  std::vector<std::weak_ptr<Communicator>> communicators;
};

// Under the lock of launching().
Graphs& graphs() {
  static Graphs* const made = new Graphs;
  return *made;
}

}  // namespace

void capture(bool is_under_way) {
  const std::lock_guard<std::mutex> lock(launching());
  graphs().is_under_way = is_under_way;
}

void destroy_graphs() {
  const std::lock_guard<std::mutex> lock(launching());
  for (const auto& captured : graphs().communicators) {
    if (const auto communicator = captured.lock()) communicator->release_graphs();
  }
  graphs().communicators.clear();
}

void launch(std::vector<Issued> calls) {
  const std::lock_guard<std::mutex> lock(launching());
  const std::shared_ptr<Communicator> communicator = calls.front().communicator;
  if (graphs().is_under_way) {
    communicator->capture();
    graphs().communicators.push_back(communicator);
  }
  const std::shared_ptr<HostStream> first = calls.front().stream;
  std::vector<std::shared_ptr<HostStream>> others;
  std::vector<std::shared_ptr<Latch>> awaited;
  std::vector<Task> tasks;
  for (Issued& call : calls) {
    tasks.push_back(std::move(call.task));
    if (call.launch_event != nullptr) call.launch_event->record(call.stream.get());
    if (call.stream == first ||
        std::find(others.begin(), others.end(), call.stream) != others.end()) {
      continue;
    }
    others.push_back(call.stream);
    awaited.push_back(call.stream->mark());
  }
  auto done = std::make_shared<Latch>();
  if (auto previous = communicator->replace_tail(done)) awaited.push_back(std::move(previous));
  auto operation = std::make_shared<Operation>(communicator, std::move(tasks));
  communicator->issue();
  first->enqueue([communicator, operation, awaited, done] {
    for (const auto& latch : awaited) latch->wait();
    if (communicator->begin() && !communicator->is_revoked()) operation->run();
    communicator->end();
    communicator->retire();
    done->set();
  });
  for (const auto& stream : others) {
    stream->enqueue([done] { done->wait(); });
  }
}

}  // namespace fake_nccl
