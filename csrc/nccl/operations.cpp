// What a communicator does once it is there; communicator.cpp has its making and its end.
#include <stdexcept>

#include "nccl/communicator.h"
#include "nccl/issue.h"

namespace tritondt::nccl {
namespace {

void* pointer_to(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void require_window(std::uintptr_t window) {
  if (window == 0) throw std::invalid_argument("the window is null; register_window returns one");
}

void check_message(const Message& message, Place place) {
  check_call(
      {CallKind::kSend, message.address, 0, message.num_bytes, ncclUint8, ncclSum, message.peer},
      place);
}

}  // namespace

void Communicator::issue_all(const std::vector<Call>& calls, cudaStream_t stream,
                             const CallConfiguration* configuration) {
  const Turn turn(*this);
  const Place place = known_place();
  for (const Call& call : calls) {
    check_call(call, place);
    if (configuration != nullptr) check_takes_configuration(*api_, call);
  }
  start(calls, stream, configuration != nullptr ? configuration->get() : nullptr);
}

void Communicator::start(const std::vector<Call>& calls, cudaStream_t stream,
                         const ncclCollConfig_t* config) {
  if (calls.size() == 1) {
    if (!issue(*api_, comm(), *place_, calls[0], stream, config)) is_ready_ = false;
    return;
  }
  if (calls.empty()) return;
  Group group(*api_);
  for (const Call& call : calls) issue(*api_, comm(), *place_, call, stream, config);
  if (!group.end()) is_ready_ = false;
}

float Communicator::simulate(const std::vector<Call>& calls, cudaStream_t stream) {
  const std::vector<Call> estimated = checked_estimated(calls);
  if (estimated.empty()) return -1;
  const Ptr child = split(0, place().rank, nullptr);
  const float us = child->simulate_here(estimated, stream);
  child->abort();
  return us;
}

float Communicator::simulate_here(const std::vector<Call>& calls, cudaStream_t stream) {
  const Turn turn(*this);
  const Place place = known_place();
  Group group(*api_);
  for (const Call& call : calls) issue(*api_, comm(), place, call, stream, nullptr);
  return group.simulate_end();
}

std::vector<Call> Communicator::checked_estimated(const std::vector<Call>& calls) {
  const Turn turn(*this);
  const Place place = known_place();
  api_->ncclGroupSimulateEnd.require();
  if (!is_blocking_) {
    throw Unsupported(api_->ncclGroupSimulateEnd.name(),
                      "a simulation was asked of a nonblocking communicator; NCCL would run the "
                      "calls, and simulates them on blocking ones only");
  }
  for (const Call& call : calls) check_call(call, place);
  return estimated_calls(calls, api_->library().version());
}

ncclRedOp_t Communicator::create_pre_mul_sum(void* factor, ncclDataType_t dtype,
                                             ncclScalarResidence_t residence) {
  const Turn turn(*this);
  require_ready();
  ncclRedOp_t op = ncclSum;
  call(api_->ncclRedOpCreatePreMulSum, &op, factor, dtype, residence, comm());
  return op;
}

void Communicator::destroy_op(ncclRedOp_t op) {
  const Turn turn(*this);
  require_ready();
  call(api_->ncclRedOpDestroy, op, comm());
}

std::uintptr_t Communicator::register_buffer(std::uintptr_t address, std::size_t num_bytes) {
  const Turn turn(*this);
  require_ready();
  void* handle = nullptr;
  call(api_->ncclCommRegister, comm(), pointer_to(address), num_bytes, &handle);
  return reinterpret_cast<std::uintptr_t>(handle);
}

void Communicator::deregister_buffer(std::uintptr_t handle) {
  const Turn turn(*this);
  require_ready();
  call(api_->ncclCommDeregister, comm(), pointer_to(handle));
}

std::uintptr_t Communicator::register_window(std::uintptr_t address, std::size_t num_bytes,
                                             int flags, double timeout_s) {
  std::list<ncclWindow_t> made(1, nullptr);
  const ncclWindow_t& window = made.front();
  {
    const Turn turn(*this);
    require_ready();
    // It stays where it is when it moves to the other list.
    windows_.splice(windows_.end(), made);
    call(api_->ncclCommWindowRegister, comm(), pointer_to(address), num_bytes, &windows_.back(),
         flags);
  }
  const char* function = api_->ncclCommWindowRegister.name();
  if (!wait(timeout_s)) {
    throw Error(function, std::string(function) + " was not done in " + std::to_string(timeout_s) +
                              " s: all ranks of the communicator must call it");
  }
  if (window == nullptr) {
    throw Unsupported(function,
                      std::string(function) + " gave no window for " + std::to_string(num_bytes) +
                          " bytes: the GPUs of this communicator share no symmetric memory, or "
                          "NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0; " +
                          api_->library().description());
  }
  return reinterpret_cast<std::uintptr_t>(window);
}

void Communicator::deregister_window(std::uintptr_t window) {
  const Turn turn(*this);
  require_ready();
  call(api_->ncclCommWindowDeregister, comm(), reinterpret_cast<ncclWindow_t>(window));
}

std::vector<std::uintptr_t> Communicator::peer_pointers(std::uintptr_t window, std::size_t offset) {
  const Turn turn(*this);
  const Place place = known_place();
  require_window(window);
  std::vector<std::uintptr_t> pointers;
  for (int rank = 0; rank < place.num_ranks; ++rank) {
    void* pointer = nullptr;
    call(api_->ncclGetPeerDevicePointer, reinterpret_cast<ncclWindow_t>(window), offset, rank,
         &pointer);
    pointers.push_back(reinterpret_cast<std::uintptr_t>(pointer));
  }
  return pointers;
}

std::uintptr_t Communicator::multimem_pointer(std::uintptr_t window, std::size_t offset) {
  const Turn turn(*this);
  require_ready();
  require_window(window);
  const auto& function = api_->ncclGetLsaMultimemDevicePointer;
  void* pointer = nullptr;
  call(function, reinterpret_cast<ncclWindow_t>(window), offset, &pointer);
  if (pointer == nullptr) {
    throw Unsupported(
        function.name(),
        std::string(function.name()) +
            " gave no address: the GPUs of this communicator have no multimem (NVLink "
            "SHARP), or NCCL_NVLS_ENABLE is 0; " +
            api_->library().description());
  }
  return reinterpret_cast<std::uintptr_t>(pointer);
}

void Communicator::put(const std::vector<Put>& puts, std::uintptr_t window, Signal signal,
                       cudaStream_t stream) {
  const Turn turn(*this);
  const Place place = known_place();
  api_->ncclPutSignal.require();
  for (const Put& put : puts) {
    check_message(put.message, place);
    if (put.message.num_bytes != 0) require_window(window);
  }
  Group group(*api_);
  for (const auto& [message, target_offset] : puts) {
    const int peer = static_cast<int>(message.peer);
    if (message.num_bytes == 0) {
      api_->call(api_->ncclSignal, peer, signal.index, signal.context, 0u, comm(), stream);
      continue;
    }
    api_->call(api_->ncclPutSignal, pointer_to(message.address),
               static_cast<std::size_t>(message.num_bytes), ncclUint8, peer,
               reinterpret_cast<ncclWindow_t>(window), target_offset, signal.index, signal.context,
               0u, comm(), stream);
  }
  if (!group.end()) is_ready_ = false;
}

void Communicator::wait_signals(const std::vector<Expected>& expected, Signal signal,
                                cudaStream_t stream) {
  const Turn turn(*this);
  const Place place = known_place();
  api_->ncclWaitSignal.require();
  std::vector<ncclWaitSignalDesc_t> descriptions;
  for (const auto& [peer, num_signals] : expected) {
    check_message({peer, 0, 0}, place);
    descriptions.push_back({num_signals, static_cast<int>(peer), signal.index, signal.context});
  }
  if (descriptions.empty()) return;  // NCCL refuses a wait for nothing
  call(api_->ncclWaitSignal, static_cast<int>(descriptions.size()), descriptions.data(), comm(),
       stream);
}

}  // namespace tritondt::nccl
