#include "transport/direct_program.h"

namespace tritondt {

void DirectPlan::list(std::size_t round, std::vector<SlotMessage>* sends,
                      std::vector<SlotMessage>* receives) const {
  sends->assign(rounds[round].sends.begin(), rounds[round].sends.end());
  receives->assign(rounds[round].receives.begin(), rounds[round].receives.end());
}

void DirectPlan::pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const {
  const DirectRound::Run& run = rounds[round].pack;
  if (run) run(operands.sources, {slot}, operands.num_threads);
}

void DirectPlan::keep(std::size_t round, const Operands& operands) const {
  const DirectRound::Run& run = rounds[round].keep;
  if (run) run(operands.sources, operands.targets, operands.num_threads);
}

void DirectPlan::unpack(std::size_t round, const Operands& operands,
                        const Addresses& arrived) const {
  const DirectRound& found = rounds[round];
  if (found.unpack) found.unpack(arrived, operands.targets, operands.num_threads);
  if (found.reduces.empty()) return;
  Addresses terms = operands.sources;
  terms.insert(terms.end(), arrived.begin(), arrived.end());
  terms.push_back(operands.staging);
  for (const DirectRound::Run& reduce : found.reduces) {
    reduce(terms, operands.targets, operands.num_threads);
  }
}

}  // namespace tritondt
