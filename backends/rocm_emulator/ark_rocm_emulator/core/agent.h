// An engine that accesses memory independently of the processors, such as a DMA queue, in the form
// in which the checks need it. It has a clock of its own. Its accesses are checked like those of a
// wave on another device: they bypass all caches and are ordered only by releases at system scope.
#pragma once

#include <memory>
#include <string>

#include "engine.h"

namespace ark_emu {

class Agent {
 public:
  virtual ~Agent() = default;
  // Called when the engine has read a word that signals it. The engine is then ordered after
  // everything that the waves that wrote the word had released.
  virtual void acquire(uint64_t address, uint64_t size) = 0;
  // Called before the engine reads or writes bytes. Returns the error of that access, if any.
  virtual std::string read(uint64_t address, uint64_t size) = 0;
  virtual std::string write(uint64_t address, uint64_t size) = 0;
  // Called before the engine writes a word that other processors poll. adds: true if it adds to the
  // word. A wave that acquires the word is ordered after the engine's reads. If `done` is true, it
  // is also ordered after the engine's writes.
  virtual std::string publish(uint64_t address, uint64_t size, bool done, bool adds = false) = 0;
};

std::unique_ptr<Agent> make_agent(Machine& machine);

}  // namespace ark_emu
