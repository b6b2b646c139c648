#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace fake_nccl {

// Open until it is set, once.
class Latch {
 public:
  void set();
  void wait();
  bool is_set();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// Stands in for a device's stream: operations that run one after the other on a thread of its own,
// while whoever enqueued them goes on.
class HostStream {
 public:
  explicit HostStream(int device);
  // Returns at once; what is in the queue still runs, as after cudaStreamDestroy.
  ~HostStream();
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  int device() const { return device_; }
  void enqueue(std::function<void()> operation);
  // Set once all that is in the queue now has run.
  std::shared_ptr<Latch> mark();
  bool is_idle();

 private:
  // An operation, or a mark, which is set when it is no longer in the queue.
  struct Entry {
    std::function<void()> operation;
    std::shared_ptr<Latch> mark;
  };
  // Outlives the stream until its queue has run dry.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Entry> entries;  // the first one is the one that runs
    bool is_closed = false;
  };
  void put(Entry entry);
  static void run(const std::shared_ptr<Queue>& queue);

  const int device_;
  const std::shared_ptr<Queue> queue_;
};

// Stands in for a device's event: stands for what was in a stream when it was last recorded.
class HostEvent {
 public:
  void record(HostStream* stream);
  // Makes what is enqueued from now on wait for what was recorded last, if anything was.
  void hold(HostStream* stream);
  void wait();
  bool is_over();

 private:
  std::shared_ptr<Latch> recorded();

  std::mutex mutex_;
  std::shared_ptr<Latch> recorded_;
};

}  // namespace fake_nccl
