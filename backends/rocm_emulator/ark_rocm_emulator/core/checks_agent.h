// Race checks of engines that access memory independently of the processors (agent.h). Used by
// checks.cpp, machine.cpp and checks_agent.cpp.
#pragma once

#include <memory>

#include "agent.h"
#include "checks_state.h"

namespace ark_emu {

class Memory;

constexpr int kEngine = -1;  // SlotHistory::device of an engine: far from every wave

std::unique_ptr<Agent> checked_agent(std::shared_ptr<Memory> memory);

// Returns what a flag publishes to waves that read it. `from` has the wave that wrote the flag, and
// the epoch in which it did. Returns null if that wave has ended; all of its accesses are then
// ordered before later ones.
const ReleaseRecord* record_of(Contributor from);

}  // namespace ark_emu
