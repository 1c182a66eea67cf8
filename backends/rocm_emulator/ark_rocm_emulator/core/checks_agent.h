// Between checks.cpp, machine.cpp and checks_agent.cpp: what engines beside the processors need.
#pragma once

#include <memory>

#include "agent.h"
#include "checks_state.h"

namespace ark_emu {

class Memory;

constexpr int kEngine = -1;              // SlotHistory::device of an engine: far from every wave

std::unique_ptr<Agent> checked_agent(std::shared_ptr<Memory> memory);

// What a wave had released when it made that access; null if it has ended, which orders all it did.
const ReleaseRecord* record_of(Contributor from);

}  // namespace ark_emu
