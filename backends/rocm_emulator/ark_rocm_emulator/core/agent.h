// An engine of a device beside its processors, such as a DMA queue, as the checks see it: an actor
// with a clock of its own. What it does is judged like a wave's accesses from another device: past
// all caches, ordered by nothing but what was released to the whole system.
#pragma once

#include <memory>
#include <string>

#include "engine.h"

namespace ark_emu {

class Agent {
 public:
  virtual ~Agent() = default;
  // The engine has read a word by which it is told something: it is ordered after what the word's
  // writers had released.
  virtual void acquire(uint64_t address, uint64_t size) = 0;
  // Before it reads, or writes, bytes: what is wrong with that, or nothing.
  virtual std::string read(uint64_t address, uint64_t size) = 0;
  virtual std::string write(uint64_t address, uint64_t size) = 0;
  // Before it writes a word that others poll; `adds`: to what is there. Who acquires it is ordered
  // after what the engine has read, and, if it is `done`, after what it has written.
  virtual std::string publish(uint64_t address, uint64_t size, bool done, bool adds = false) = 0;
};

std::unique_ptr<Agent> make_agent(Machine& machine);

}  // namespace ark_emu
