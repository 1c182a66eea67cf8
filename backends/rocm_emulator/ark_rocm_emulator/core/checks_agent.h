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

// Returns what a wave's flags publish to waves that read them, at one point of the wave's history:
// `from` has the wave and the epoch in which it wrote the flag. Returns null if the wave has ended.
// Then all of its accesses are ordered before later ones.
const ReleaseRecord* record_of(Contributor from);

}  // namespace ark_emu
