// The decoded instructions of a code object's image, filled in as waves reach them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "decode.h"

namespace ark_emu {

// An instruction of a row. A row is a sequence of instructions that are stored one after another
// and run without the scheduler's tests in between. Only the last instruction of a row may branch,
// end a slice (the wave's turn), write EXEC, or use MODE, the register index or the time.
struct Step {
  Handler run, whole;
  const Inst* inst;
  int32_t left;     // number of steps from this one to the row's end
};

class Program {
 public:
  // image: the loaded image, which begins with virtual address 0. Only the bytes [code_begin,
  // code_end) are executed.
  Program(Arch arch, std::span<const uint8_t> image, uint64_t code_begin, uint64_t code_end);
  Arch arch() const { return arch_; }
  // Returns the instruction at dword index `pc` of the image. For an index outside of the code, it
  // returns an Inst that faults.
  const Inst& at(uint32_t pc) {
    const uint32_t slot = pc - first_;
    if (slot < count_) {
      const Inst* inst = slots_[slot].load(std::memory_order_acquire);
      if (inst != nullptr) return *inst;
    }
    return decode_at(pc);
  }
  // Returns the instruction at `pc` as the first step of a row.
  const Step& step_at(uint32_t pc) {
    const uint32_t slot = pc - first_;
    if (slot < count_) {
      const Step* step = steps_[slot].load(std::memory_order_acquire);
      if (step != nullptr) return *step;
    }
    return make_steps(pc);
  }
  uint64_t code_begin() const { return begin_; }
  uint64_t code_end() const { return end_; }

 private:
  const Inst& decode_at(uint32_t pc);
  const Step& make_steps(uint32_t pc);
  Arch arch_;
  const Decoder& decoder_;
  uint64_t begin_, end_;
  uint32_t first_, count_;        // the code: index of its first dword, number of dwords
  std::vector<uint32_t> words_;
  std::unique_ptr<std::atomic<const Inst*>[]> slots_;
  std::unique_ptr<std::atomic<const Step*>[]> steps_;
  std::mutex mutex_;
  std::deque<Inst> store_;
  std::deque<std::vector<Step>> rows_;
};

}  // namespace ark_emu
