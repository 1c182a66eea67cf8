// Starts a grid on a thread of its own.
#pragma once

#include <functional>
#include <memory>

#include "engine.h"
#include "memory.h"

namespace ark_emu {

using Hook = std::function<bool()>;   // device-side engines, see Machine::set_engine_hook

// `machine` stays alive as long as the launch; `at_end` is called when the grid has ended.
std::shared_ptr<Launch> start_launch(std::shared_ptr<Machine> machine, Memory& memory,
                                     LaunchDesc desc, Hook hook, std::function<void()> at_end);

}  // namespace ark_emu
