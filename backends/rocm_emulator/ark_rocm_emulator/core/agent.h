// The checks' interface to an engine that accesses memory independently of the processors, such as
// a DMA queue. The engine has its own vector clock. Its accesses are checked like those of a wave
// on another device: they bypass all caches, and only releases at system scope order them.
#pragma once

#include <memory>
#include <string>

#include "engine.h"

namespace ark_emu {

class Agent {
 public:
  virtual ~Agent() = default;
  // Called when the engine has read a word by which waves signal it. From then on the engine is
  // ordered after everything that the writers of the word had released.
  virtual void acquire(uint64_t address, uint64_t size) = 0;
  // Called before the engine reads or writes bytes. Returns the error of that access, if any.
  virtual std::string read(uint64_t address, uint64_t size) = 0;
  virtual std::string write(uint64_t address, uint64_t size) = 0;
  // Called before the engine writes a word that waves poll. A wave that acquires the word is
  // ordered after the engine's reads, and if `done` is true also after the engine's writes. adds:
  // true if the engine adds to the word.
  virtual std::string publish(uint64_t address, uint64_t size, bool done, bool adds = false) = 0;
};

std::unique_ptr<Agent> make_agent(Machine& machine);

}  // namespace ark_emu
