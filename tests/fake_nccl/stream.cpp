#include "stream.h"

#include <thread>
#include <utility>

namespace fake_nccl {

void Latch::set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_set_ = true;
  changed_.notify_all();
}

void Latch::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

bool Latch::is_set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_set_;
}

HostStream::HostStream(int device) : device_(device), queue_(std::make_shared<Queue>()) {
  std::thread([queue = queue_] { run(queue); }).detach();
}

HostStream::~HostStream() {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->is_closed = true;
  queue_->changed.notify_all();
}

void HostStream::enqueue(std::function<void()> operation) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->operations.push_back(std::move(operation));
  queue_->changed.notify_all();
}

std::shared_ptr<Latch> HostStream::mark() {
  auto latch = std::make_shared<Latch>();
  enqueue([latch] { latch->set(); });
  return latch;
}

bool HostStream::is_idle() {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  return queue_->operations.empty();
}

void HostStream::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->is_closed || !queue->operations.empty(); });
    if (queue->operations.empty()) return;
    // Taken out only when it has run: a stream that runs something is not idle.
    std::function<void()> operation = std::move(queue->operations.front());
    lock.unlock();
    operation();
    operation = nullptr;  // what it holds goes before others hear that it is over
    lock.lock();
    queue->operations.pop_front();
  }
}

void HostEvent::record(HostStream* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recorded_ = stream->mark();
}

std::shared_ptr<Latch> HostEvent::recorded() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

void HostEvent::hold(HostStream* stream) {
  if (const auto latch = recorded()) stream->enqueue([latch] { latch->wait(); });
}

void HostEvent::wait() {
  if (const auto latch = recorded()) latch->wait();
}

bool HostEvent::is_over() {
  const auto latch = recorded();
  return latch == nullptr || latch->is_set();
}

}  // namespace fake_nccl
