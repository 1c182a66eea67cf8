// Functions of the checks for engines beside the processors, shared by checks.cpp, machine.cpp and
// checks_agent.cpp.
#pragma once

#include <memory>

#include "agent.h"
#include "checks_state.h"

namespace ark_emu {

class Memory;

constexpr int kEngine = -1;  // SlotHistory::device of an engine: far from every wave

std::unique_ptr<Agent> checked_agent(std::shared_ptr<Memory> memory);

// An access is given by its wave and the wave's epoch at that time (`from`). Returns what flags
// that the wave wrote at that epoch publish to their readers. Returns null if the wave has ended:
// then all of its accesses are ordered before later ones.
const ReleaseRecord* record_of(Contributor from);

}  // namespace ark_emu
