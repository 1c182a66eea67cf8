#include "program.h"

#include <algorithm>
#include <cstring>

#include "waits.h"
#include "wave.h"

namespace ark_emu {
namespace {

void left_the_code(Wave&, const Inst&) {
  throw Fault{ErrorKind::OutOfBounds, "the program counter left the code of the code object"};
}

bool writes_exec(const Inst& inst) {
  if ((inst.op->flags & kWritesExec) != 0) return true;
  return std::any_of(std::begin(inst.dst), std::end(inst.dst), [](const Operand& dst) {
    return dst.kind == Kind::Sgpr && dst.reg <= 127 && dst.reg + std::max<int>(dst.dwords, 1) > 126;
  });
}

// True if this instruction ends a row. A row is a sequence of instructions that execute without
// checks in between.
bool ends_row(const Inst& inst) {
  if (inst.op == nullptr || (inst.op->flags & (kBranch | kSync)) != 0) return true;
  const std::string_view name = inst.op->name;
  if (writes_exec(inst) || name.starts_with("s_set_gpr_idx")) return true;
  switch (inst.format) {
    case Format::SOPP:
      return name != "s_nop" && name != "s_delay_alu" && name != "s_clause" && !is_wait(inst);
    case Format::SOP1: return name.starts_with("s_sendmsg");
    case Format::SOPK: return name.starts_with("s_getreg") || name.starts_with("s_setreg");
    case Format::SMEM: return name.starts_with("s_mem");   // s_memtime, s_memrealtime
    default: return false;
  }
}

}  // namespace

Program::Program(Arch arch, std::span<const uint8_t> image, uint64_t code_begin, uint64_t code_end)
    : arch_(arch), decoder_(decoder_for(arch)), begin_(code_begin), end_(code_end),
      first_(static_cast<uint32_t>((code_begin + 3) / 4)),
      count_(code_end / 4 > first_ ? static_cast<uint32_t>(code_end / 4) - first_ : 0),
      words_(count_), slots_(std::make_unique<std::atomic<const Inst*>[]>(count_)),
      steps_(std::make_unique<std::atomic<const Step*>[]>(count_)) {
  if (count_ > 0) std::memcpy(words_.data(), image.data() + uint64_t{first_} * 4, count_ * 4ull);
}

const Inst& Program::decode_at(uint32_t pc) {
  const std::lock_guard lock(mutex_);
  const uint32_t slot = pc - first_;
  if (slot >= count_) {
    Inst& outside = store_.emplace_back();
    outside.pc = pc;
    outside.next = pc;
    outside.run = outside.whole = left_the_code;
    return outside;
  }
  const Inst* known = slots_[slot].load(std::memory_order_relaxed);
  if (known != nullptr) return *known;
  const Inst& inst = store_.emplace_back(decoder_.decode(std::span(words_).subspan(slot), pc));
  slots_[slot].store(&inst, std::memory_order_release);
  return inst;
}

// Decodes a row of instructions, from dword index `pc` on. The row also ends before an instruction
// at which another row already begins.
const Step& Program::make_steps(uint32_t pc) {
  std::vector<Step> row;
  for (uint32_t next = pc;;) {
    const Inst& inst = at(next);
    row.push_back({inst.run, inst.whole, &inst, 0});
    next = inst.next;
    if (ends_row(inst)) break;
    if (next - first_ < count_ && steps_[next - first_].load(std::memory_order_acquire)) break;
  }
  for (size_t k = 0; k < row.size(); k++) row[k].left = static_cast<int32_t>(row.size() - k);
  const std::lock_guard lock(mutex_);
  const std::vector<Step>& kept = rows_.emplace_back(std::move(row));
  for (const Step& step : kept) {
    const uint32_t slot = step.inst->pc - first_;
    const Step* unknown = nullptr;
    if (slot < count_) steps_[slot].compare_exchange_strong(unknown, &step);
  }
  return kept.front();
}

}  // namespace ark_emu
