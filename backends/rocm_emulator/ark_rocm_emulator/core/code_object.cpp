#include "code_object.h"

#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "decode.h"

namespace ark_emu {

std::shared_ptr<CodeObject> CodeObject::from_bytes(std::span<const uint8_t> bytes,
                                                   std::string_view want) {
  return std::make_shared<CodeObjectImpl>(read_elf(bytes, want));
}

CodeObjectImpl::CodeObjectImpl(ElfFile elf) : elf_(std::move(elf)) {
  program_ = std::make_unique<Program>(elf_.arch, elf_.image, elf_.code_begin, elf_.code_end);
}

const KernelInfo* CodeObjectImpl::find_kernel(std::string_view name) const {
  for (const KernelInfo& kernel : elf_.kernels) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

std::string CodeObjectImpl::describe(uint64_t offset) const {
  const SymbolInfo* best = nullptr;
  for (const SymbolInfo& symbol : elf_.symbols) {
    if (!symbol.function || symbol.offset > offset) continue;
    if (best == nullptr || symbol.offset > best->offset) best = &symbol;
  }
  char text[32];
  std::snprintf(text, sizeof text, "+0x%" PRIx64, best == nullptr ? offset : offset - best->offset);
  return (best == nullptr ? std::string("code") : best->name) + text;
}

std::string CodeObjectImpl::disassemble(std::string_view function) const {
  uint64_t at = elf_.code_begin, end = elf_.code_end;
  if (!function.empty()) {
    const auto found = std::find_if(elf_.symbols.begin(), elf_.symbols.end(), [&](const auto& s) {
      return s.function && s.name == function;
    });
    if (found == elf_.symbols.end()) {
      throw Error("the code object has no function '" + std::string(function) + "'");
    }
    at = found->offset;
    end = std::min(end, at + found->size);
  }
  std::string text;
  while (at < end) {
    const Inst& inst = program_->at(static_cast<uint32_t>(at / 4));
    char line[96];
    int used = std::snprintf(line, sizeof line, "%06" PRIx64 ": ", at);
    const uint32_t words = inst.next > inst.pc ? inst.next - inst.pc : 1;
    for (uint32_t k = 0; k < words && k < 4; k++) {
      used += std::snprintf(line + used, sizeof line - static_cast<size_t>(used), "%08x ",
                            inst.words[k]);
    }
    text += line;
    text += " " + ark_emu::disassemble(inst, elf_.arch) + "\n";
    at += 4ull * words;
  }
  return text;
}

LoadedCodeImpl::LoadedCodeImpl(std::shared_ptr<CodeObjectImpl> code, std::shared_ptr<Memory> memory,
                               int device)
    : code_(std::move(code)), memory_(std::move(memory)), device_(device) {
  const ElfFile& elf = code_->elf();
  void* mapped = mmap(nullptr, elf.image.size(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw Error("no memory for a code object's image");
  image_ = reinterpret_cast<uint64_t>(mapped);
  auto* bytes = static_cast<uint8_t*>(mapped);
  std::memcpy(bytes, elf.image.data(), elf.image.size());
  constexpr uint32_t kAbs32Low = 1, kAbs32High = 2, kAbs64 = 3, kAbs32 = 6, kRelative64 = 13;
  for (const Relocation& r : elf.relocations) {
    const uint64_t value = image_ + r.symbol_value + static_cast<uint64_t>(r.addend);
    const auto low = static_cast<uint32_t>(value), high = static_cast<uint32_t>(value >> 32);
    switch (r.type) {
      case kAbs64: case kRelative64: std::memcpy(bytes + r.offset, &value, 8); break;
      case kAbs32Low: case kAbs32: std::memcpy(bytes + r.offset, &low, 4); break;
      case kAbs32High: std::memcpy(bytes + r.offset, &high, 4); break;
      default:
        munmap(mapped, elf.image.size());
        throw Error("the code object has a relocation of type " + std::to_string(r.type) +
                    ", which the emulator does not apply");
    }
  }
  Region region;
  region.base = image_;
  region.size = elf.image.size();
  region.device = device;
  region.kind = MemKind::Code;
  region.initialised = true;
  region.name = "code object";
  memory_->add(std::move(region));
}

LoadedCodeImpl::~LoadedCodeImpl() {
  memory_->remove(image_);
  munmap(reinterpret_cast<void*>(image_), code_->elf().image.size());
}

uint64_t LoadedCodeImpl::address_of(std::string_view symbol) const {
  for (const SymbolInfo& s : code_->symbols()) {
    if (s.name == symbol) return image_ + s.offset;
  }
  return 0;
}

}  // namespace ark_emu
