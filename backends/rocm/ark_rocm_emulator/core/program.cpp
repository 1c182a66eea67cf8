#include "program.h"

#include <cstring>

#include "wave.h"

namespace ark_emu {
namespace {

void left_the_code(Wave&, const Inst&) {
  throw Fault{ErrorKind::OutOfBounds, "the program counter left the code of the code object"};
}

}  // namespace

Program::Program(Arch arch, std::span<const uint8_t> image, uint64_t code_begin, uint64_t code_end)
    : arch_(arch), decoder_(decoder_for(arch)), begin_(code_begin), end_(code_end) {
  words_.resize(code_end / 4);
  std::memcpy(words_.data(), image.data(), words_.size() * 4);
  count_ = static_cast<uint32_t>(words_.size());
  slots_ = std::make_unique<std::atomic<const Inst*>[]>(count_);
}

const Inst& Program::decode_at(uint32_t pc) {
  const std::lock_guard lock(mutex_);
  if (pc >= count_ || uint64_t(pc) * 4 < begin_) {
    Inst& outside = store_.emplace_back();
    outside.pc = pc;
    outside.next = pc;
    outside.run = left_the_code;
    return outside;
  }
  const Inst* known = slots_[pc].load(std::memory_order_relaxed);
  if (known != nullptr) return *known;
  const Inst& inst =
      store_.emplace_back(decoder_.decode(std::span(words_).subspan(pc), pc));
  slots_[pc].store(&inst, std::memory_order_release);
  return inst;
}

}  // namespace ark_emu
