#include "transport/direct_program.h"

#include <utility>

namespace tritondt {

DirectPlan::DirectPlan(std::vector<SlotMessage> sends, std::vector<SlotMessage> receives,
                       MessageSlices socket_sends, MessageSlices socket_receives, bool uses_sockets,
                       Run pack, Run keep, Run unpack, std::vector<Run> reduces)
    : sends(std::move(sends)),
      receives(std::move(receives)),
      run_pack(std::move(pack)),
      run_keep(std::move(keep)),
      run_unpack(std::move(unpack)),
      socket_sends_(std::move(socket_sends)),
      socket_receives_(std::move(socket_receives)),
      uses_sockets_(uses_sockets),
      reduces_(std::move(reduces)) {}

void DirectPlan::list(std::size_t /*round*/, std::vector<SlotMessage>* leaving,
                      std::vector<SlotMessage>* coming) const {
  leaving->assign(sends.begin(), sends.end());
  coming->assign(receives.begin(), receives.end());
}

void DirectPlan::pack(std::size_t /*round*/, const Operands& operands, std::uintptr_t slot) const {
  if (run_pack) run_pack(operands.sources, {slot, operands.send_buffer}, operands.num_threads);
}

void DirectPlan::keep(std::size_t /*round*/, const Operands& operands) const {
  if (run_keep) run_keep(operands.sources, operands.targets, operands.num_threads);
}

void DirectPlan::unpack(std::size_t /*round*/, const Operands& operands,
                        const Addresses& arrived) const {
  if (run_unpack) run_unpack(arrived, operands.targets, operands.num_threads);
  if (reduces_.empty()) return;
  Addresses terms = operands.sources;
  terms.insert(terms.end(), arrived.begin(), arrived.end());
  for (const Run& reduce : reduces_) reduce(terms, operands.targets, operands.num_threads);
}

void DirectPlan::start_sockets(SocketGroup* group, const Operands& operands,
                               std::uint64_t tag) const {
  group->start(socket_sends_.messages(operands.sources, operands.send_buffer),
               socket_receives_.messages(operands.targets, operands.receive_buffer), tag);
}

}  // namespace tritondt
