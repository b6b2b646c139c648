#include "engine/stream.h"

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

void HostStream::put(Entry entry) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->entries.push_back(std::move(entry));
  queue_->changed.notify_all();
}

void HostStream::enqueue(std::function<void()> operation) { put({std::move(operation), nullptr}); }

std::shared_ptr<Latch> HostStream::mark() {
  auto latch = std::make_shared<Latch>();
  put({nullptr, latch});
  return latch;
}

bool HostStream::is_idle() {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  return queue_->entries.empty();
}

void HostStream::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->is_closed || !queue->entries.empty(); });
    if (queue->entries.empty()) return;
    // Taken out only when it has run: a stream that runs something is not idle.
    Entry entry = std::move(queue->entries.front());
    lock.unlock();
    if (entry.operation != nullptr) entry.operation();
    entry.operation = nullptr;  // what it holds goes before others hear that it is over
    lock.lock();
    queue->entries.pop_front();
    if (entry.mark == nullptr) continue;
    // After it has gone: a stream that somebody has waited for is idle.
    lock.unlock();
    entry.mark->set();
    lock.lock();
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
