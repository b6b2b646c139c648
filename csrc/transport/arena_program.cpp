#include "transport/arena_program.h"

namespace tritondt {

void ArenaPlan::list(std::size_t round, std::vector<SlotMessage>* sends,
                     std::vector<SlotMessage>* receives) const {
  sends->assign(rounds[round].sends.begin(), rounds[round].sends.end());
  receives->assign(rounds[round].receives.begin(), rounds[round].receives.end());
}

void ArenaPlan::pack(std::size_t round, const Operands& operands, std::uintptr_t slot) const {
  const ArenaRound::Run& run = rounds[round].pack;
  if (run) run(operands.sources, {slot}, operands.num_threads);
}

void ArenaPlan::keep(std::size_t round, const Operands& operands) const {
  const ArenaRound::Run& run = rounds[round].keep;
  if (run) run(operands.sources, operands.targets, operands.num_threads);
}

void ArenaPlan::unpack(std::size_t round, const Operands& operands,
                       const Addresses& arrived) const {
  const ArenaRound& found = rounds[round];
  if (found.unpack) found.unpack(arrived, operands.targets, operands.num_threads);
  if (found.reduces.empty()) return;
  Addresses terms = operands.sources;
  terms.insert(terms.end(), arrived.begin(), arrived.end());
  terms.push_back(operands.staging);
  for (const ArenaRound::Run& reduce : found.reduces) {
    reduce(terms, operands.targets, operands.num_threads);
  }
}

}  // namespace tritondt
