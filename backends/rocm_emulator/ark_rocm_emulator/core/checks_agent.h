// Functions of the checks for engines beside the processors, shared by checks.cpp, machine.cpp and
// checks_agent.cpp.
#pragma once

#include <memory>

#include "agent.h"
#include "checks_state.h"

namespace ark_emu {

class Memory;

constexpr int kEngine = -1;              // SlotHistory::device of an engine: far from every wave

std::unique_ptr<Agent> checked_agent(std::shared_ptr<Memory> memory);

// The state that wave `from` had released when it made the given access. Null if the wave has
// ended: then everything that it did is ordered before.
const ReleaseRecord* record_of(Contributor from);

}  // namespace ark_emu
