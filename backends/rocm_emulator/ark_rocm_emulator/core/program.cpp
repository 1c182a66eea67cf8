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
    : arch_(arch), decoder_(decoder_for(arch)), begin_(code_begin), end_(code_end),
      first_(static_cast<uint32_t>((code_begin + 3) / 4)),
      count_(code_end / 4 > first_ ? static_cast<uint32_t>(code_end / 4) - first_ : 0),
      words_(count_), slots_(std::make_unique<std::atomic<const Inst*>[]>(count_)) {
  if (count_ > 0) std::memcpy(words_.data(), image.data() + uint64_t{first_} * 4, count_ * 4ull);
}

const Inst& Program::decode_at(uint32_t pc) {
  const std::lock_guard lock(mutex_);
  const uint32_t slot = pc - first_;
  if (slot >= count_) {
    Inst& outside = store_.emplace_back();
    outside.pc = pc;
    outside.next = pc;
    outside.run = left_the_code;
    return outside;
  }
  const Inst* known = slots_[slot].load(std::memory_order_relaxed);
  if (known != nullptr) return *known;
  const Inst& inst = store_.emplace_back(decoder_.decode(std::span(words_).subspan(slot), pc));
  slots_[slot].store(&inst, std::memory_order_release);
  return inst;
}

}  // namespace ark_emu
