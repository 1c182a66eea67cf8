// The contents of an AMDGPU ELF, read once: the image, its symbols, relocations and kernel
// metadata.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine.h"

namespace ark_emu {

struct Relocation {
  uint64_t offset;
  uint32_t type;
  uint64_t symbol_value;   // offset in the image; 0 for relative relocations
  int64_t addend;
};

// A kernel descriptor (64 bytes of the image), in the layout of the LLVM AMDGPU guide.
struct KernelDescriptor {
  uint32_t lds_bytes, scratch_bytes, kernarg_size;
  int64_t entry_offset;                    // from the descriptor
  uint32_t rsrc1, rsrc2, rsrc3;
  uint16_t properties, kernarg_preload;
};

struct ElfFile {
  Arch arch = Arch::gfx942;
  std::vector<uint8_t> image;              // loaded segments, virtual address 0 first
  uint64_t code_begin = 0, code_end = 0;   // executable bytes of the image
  std::vector<SymbolInfo> symbols;         // defined variables and functions
  std::vector<Relocation> relocations;
  std::vector<KernelInfo> kernels;
};

// Throws Error with a description if the bytes are not valid. want: see CodeObject::from_bytes.
ElfFile read_elf(std::span<const uint8_t> bytes, std::string_view want);
KernelDescriptor read_descriptor(const ElfFile& elf, uint64_t offset);
// Reads kernels from the metadata note's msgpack. Their fields `entry` and `descriptor` are still
// 0.
std::vector<KernelInfo> read_metadata(std::span<const uint8_t> msgpack);

}  // namespace ark_emu
