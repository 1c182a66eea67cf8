#include "elf.h"

#include <algorithm>
#include <cstring>

namespace ark_emu {
namespace {

struct Header {
  uint8_t ident[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, phoff, shoff;
  uint32_t flags;
  uint16_t ehsize, phentsize, phnum, shentsize, shnum, shstrndx;
};

struct Segment {
  uint32_t type, flags;
  uint64_t offset, vaddr, paddr, filesz, memsz, align;
};

struct Section {
  uint32_t name, type;
  uint64_t flags, addr, offset, size;
  uint32_t link, info;
  uint64_t align, entsize;
};

struct Symbol {
  uint32_t name;
  uint8_t info, other;
  uint16_t section;
  uint64_t value, size;
};

struct Rela {
  uint64_t offset, info;
  int64_t addend;
};

constexpr uint16_t kMachineAmdGpu = 224;
constexpr uint32_t kLoad = 1, kNote = 4, kSymtab = 2, kRela = 4, kDynsym = 11;
constexpr uint32_t kMetadataNote = 32;
constexpr uint16_t kReservedSections = 0xff00;   // section numbers from here on are reserved
constexpr uint64_t kMaxImage = 1ull << 30, kMaxCode = 1ull << 28;
constexpr uint64_t kMaxArguments = 1 << 20, kMaxScratch = 1 << 20;

[[noreturn]] void bad(const std::string& what) {
  throw Error("this is not a code object the emulator can load: " + what);
}

template <class T>
T read_at(std::span<const uint8_t> bytes, uint64_t offset, const char* what) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T))
    bad(std::string(what) + " is cut");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

std::span<const uint8_t> part(std::span<const uint8_t> bytes, uint64_t offset, uint64_t size,
                              const char* what) {
  if (offset > bytes.size() || bytes.size() - offset < size) bad(std::string(what) + " is cut");
  return bytes.subspan(offset, size);
}

std::string text_at(std::span<const uint8_t> strings, uint64_t offset) {
  if (offset >= strings.size()) return {};
  const auto* begin = reinterpret_cast<const char*>(strings.data()) + offset;
  return {begin, strnlen(begin, strings.size() - offset)};
}

Arch arch_of(uint32_t flags) {
  switch (flags & 0xff) {
    case 0x3f: return Arch::gfx90a;
    case 0x4c: return Arch::gfx942;
    case 0x4f: return Arch::gfx950;
    case 0x41: return Arch::gfx1100;
    default:
      bad("its processor number is " + std::to_string(flags & 0xff) +
          "; the emulator supports gfx90a, gfx942, gfx950 and gfx1100");
  }
}

// Returns the entry of a clang offload bundle whose target triple ends with the requested
// processor.
std::span<const uint8_t> unbundle(std::span<const uint8_t> bytes, std::string_view want) {
  constexpr std::string_view kMagic = "__CLANG_OFFLOAD_BUNDLE__";
  constexpr std::string_view kCompressed = "CCOB";
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()),
                              std::min<size_t>(bytes.size(), kMagic.size()));
  if (head.starts_with(kCompressed)) {
    bad("it is a compressed offload bundle; build with --no-offload-compress");
  }
  if (head != kMagic) return bytes;
  std::vector<std::pair<std::string, std::span<const uint8_t>>> found;
  const auto count = read_at<uint64_t>(bytes, kMagic.size(), "the offload bundle's header");
  uint64_t at = kMagic.size() + 8;
  for (uint64_t k = 0; k < count && k < 256; k++) {
    const auto offset = read_at<uint64_t>(bytes, at, "the offload bundle's header");
    const auto size = read_at<uint64_t>(bytes, at + 8, "the offload bundle's header");
    const auto length = read_at<uint64_t>(bytes, at + 16, "the offload bundle's header");
    const auto name = part(bytes, at + 24, length, "the offload bundle's header");
    at += 24 + length;
    const std::string triple(reinterpret_cast<const char*>(name.data()), name.size());
    if (triple.find("amdgcn") == std::string::npos) continue;
    if (!want.empty() && triple.find(want) == std::string::npos) continue;
    found.emplace_back(triple, part(bytes, offset, size, "an entry of the offload bundle"));
  }
  if (found.size() == 1 || (found.size() > 1 && !want.empty())) return found[0].second;
  if (found.empty()) bad("the offload bundle has no code object for " + std::string(want));
  bad("the offload bundle has code objects for several processors; choose one");
}

struct File {
  std::span<const uint8_t> bytes;
  std::vector<Segment> segments;
  std::vector<Section> sections;
  std::span<const uint8_t> data(const Section& s) const {
    return part(bytes, s.offset, s.size, "a section");
  }
};

File open_file(std::span<const uint8_t> bytes, Header& header) {
  if (bytes.size() < sizeof(Header) || std::memcmp(bytes.data(), "\x7f" "ELF", 4) != 0) {
    bad("it does not start with an ELF header (" + std::to_string(bytes.size()) + " bytes)");
  }
  header = read_at<Header>(bytes, 0, "the ELF header");
  if (header.ident[4] != 2 || header.ident[5] != 1 || header.machine != kMachineAmdGpu) {
    bad("it is an ELF for another machine (" + std::to_string(header.machine) +
        "), AMDGPU is 224");
  }
  File file{bytes, {}, {}};
  for (uint64_t k = 0; k < header.phnum; k++) {
    file.segments.push_back(
        read_at<Segment>(bytes, header.phoff + k * header.phentsize, "the program header table"));
  }
  for (uint64_t k = 0; k < header.shnum; k++) {
    file.sections.push_back(
        read_at<Section>(bytes, header.shoff + k * header.shentsize, "the section header table"));
  }
  return file;
}

void load_segments(const File& file, ElfFile& out) {
  uint64_t size = 0;
  for (const Segment& s : file.segments) {
    if (s.type != kLoad) continue;
    if (s.vaddr > kMaxImage || s.memsz > kMaxImage - s.vaddr || s.filesz > s.memsz)
      bad("a segment is absurd");
    size = std::max(size, s.vaddr + s.memsz);
  }
  if (size == 0) bad("it has no loadable segment (an object file? link it with ld.lld -shared)");
  out.image.resize((size + 4095) / 4096 * 4096);
  out.code_begin = ~0ull;
  for (const Segment& s : file.segments) {
    if (s.type != kLoad) continue;
    const auto from = part(file.bytes, s.offset, s.filesz, "a segment");
    std::copy(from.begin(), from.end(), out.image.begin() + static_cast<int64_t>(s.vaddr));
    if ((s.flags & 1) == 0) continue;
    out.code_begin = std::min(out.code_begin, s.vaddr);
    out.code_end = std::max(out.code_end, s.vaddr + s.filesz);
  }
  if (out.code_begin > out.code_end) out.code_begin = out.code_end;
  if (out.code_end - out.code_begin > kMaxCode) bad("its code spans more than 256 MiB");
}

std::vector<Symbol> symbols_of(const File& file, const Section& section) {
  std::vector<Symbol> symbols;
  const auto bytes = file.data(section);
  for (uint64_t at = 0; at + sizeof(Symbol) <= bytes.size(); at += sizeof(Symbol)) {
    symbols.push_back(read_at<Symbol>(bytes, at, "a symbol table"));
  }
  return symbols;
}

void load_symbols(const File& file, ElfFile& out) {
  for (const Section& section : file.sections) {
    if (section.type != kSymtab && section.type != kDynsym) continue;
    if (section.link >= file.sections.size()) bad("a symbol table has no strings");
    const auto strings = file.data(file.sections[section.link]);
    for (const Symbol& symbol : symbols_of(file, section)) {
      const int type = symbol.info & 15;
      const bool in_image = symbol.section != 0 && symbol.section < kReservedSections;
      if (!in_image || (type != 1 && type != 2)) continue;
      SymbolInfo info{text_at(strings, symbol.name), symbol.value, symbol.size, type == 2};
      if (info.offset > out.image.size() || out.image.size() - info.offset < info.size)
        bad("the symbol '" + info.name + "' lies outside the image");
      const bool known = std::any_of(out.symbols.begin(), out.symbols.end(), [&](const auto& s) {
        return s.name == info.name && s.offset == info.offset;
      });
      if (!known) out.symbols.push_back(std::move(info));
    }
  }
}

void load_relocations(const File& file, ElfFile& out) {
  constexpr uint64_t kAlloc = 2;
  for (const Section& section : file.sections) {
    if (section.type != kRela || (section.flags & kAlloc) == 0) continue;
    if (section.link >= file.sections.size()) bad("a relocation table has no symbols");
    const Section& table = file.sections[section.link];
    const std::vector<Symbol> symbols = symbols_of(file, table);
    const auto bytes = file.data(section);
    for (uint64_t at = 0; at + sizeof(Rela) <= bytes.size(); at += sizeof(Rela)) {
      const auto rela = read_at<Rela>(bytes, at, "a relocation table");
      const uint64_t index = rela.info >> 32;
      if (index >= symbols.size()) bad("a relocation refers to a symbol that does not exist");
      if (index != 0 && symbols[index].section == 0) {
        const auto strings = file.data(file.sections[table.link]);
        bad("it needs the symbol '" + text_at(strings, symbols[index].name) +
            "', which nothing defines");
      }
      if (rela.offset > out.image.size() || out.image.size() - rela.offset < 8)
        bad("a relocation lies outside the image");
      out.relocations.push_back({rela.offset, static_cast<uint32_t>(rela.info),
                                 index == 0 ? 0 : symbols[index].value, rela.addend});
    }
  }
}

// Checks a kernel's sizes and counts, such as LDS bytes and registers, so that a launch can rely on
// them.
void check_kernel(const KernelInfo& kernel, const KernelDescriptor& descriptor) {
  const auto wrong = [&kernel](const char* what, uint64_t value, uint64_t most) {
    bad("kernel '" + kernel.name + "' needs " + std::to_string(value) + " " + what +
        "; at most " + std::to_string(most) + " are allowed");
  };
  const auto within = [&wrong](const char* what, uint64_t value, uint64_t most) {
    if (value > most) wrong(what, value, most);
  };
  within("bytes of arguments", kernel.kernarg_size, kMaxArguments);
  within("bytes of private memory a lane", kernel.scratch_bytes, kMaxScratch);
  within("bytes of private memory a lane", descriptor.scratch_bytes, kMaxScratch);
  within("vector registers", kernel.vgprs, 512);
  within("accumulation registers", kernel.agprs, 256);
  within("lanes a workgroup", kernel.max_flat_workgroup, 1024);
  within("preloaded argument dwords", descriptor.kernarg_preload & 0x7f, 16);
  if (kernel.wave_size != ((descriptor.properties >> 10) & 1 ? 32 : 64)) {
    bad("kernel '" + kernel.name + "' is for waves of " + std::to_string(kernel.wave_size) +
        " in the metadata, but not in its descriptor");
  }
  for (const KernelArg& arg : kernel.args) {
    if (uint64_t{arg.offset} + arg.size > kernel.kernarg_size) {
      bad("an argument of kernel '" + kernel.name + "' lies outside its argument block");
    }
  }
}

void load_kernels(const File& file, ElfFile& out) {
  for (const Segment& segment : file.segments) {
    if (segment.type != kNote) continue;
    const auto notes = part(file.bytes, segment.offset, segment.filesz, "a note");
    for (uint64_t at = 0; at + 12 <= notes.size();) {
      const auto name_size = read_at<uint32_t>(notes, at, "a note");
      const auto size = read_at<uint32_t>(notes, at + 4, "a note");
      const auto type = read_at<uint32_t>(notes, at + 8, "a note");
      const uint64_t body = at + 12 + (uint64_t{name_size} + 3) / 4 * 4;
      const auto bytes = part(notes, body, size, "a note");
      if (type == kMetadataNote) out.kernels = read_metadata(bytes);
      at = body + (uint64_t{size} + 3) / 4 * 4;
    }
  }
  for (KernelInfo& kernel : out.kernels) {
    const auto found = std::find_if(out.symbols.begin(), out.symbols.end(), [&](const auto& s) {
      return s.name == kernel.name + ".kd";
    });
    if (found == out.symbols.end()) bad("kernel '" + kernel.name + "' has no descriptor");
    kernel.descriptor = found->offset;
    const KernelDescriptor d = read_descriptor(out, found->offset);
    kernel.entry = found->offset + static_cast<uint64_t>(d.entry_offset);
    if (kernel.entry < out.code_begin || kernel.entry >= out.code_end || kernel.entry % 4 != 0) {
      bad("kernel '" + kernel.name + "' begins outside the code");
    }
    check_kernel(kernel, d);
  }
}

}  // namespace

KernelDescriptor read_descriptor(const ElfFile& elf, uint64_t offset) {
  const auto bytes = part(elf.image, offset, 64, "a kernel descriptor");
  KernelDescriptor d;
  d.lds_bytes = read_at<uint32_t>(bytes, 0, "");
  d.scratch_bytes = read_at<uint32_t>(bytes, 4, "");
  d.kernarg_size = read_at<uint32_t>(bytes, 8, "");
  d.entry_offset = read_at<int64_t>(bytes, 16, "");
  d.rsrc3 = read_at<uint32_t>(bytes, 44, "");
  d.rsrc1 = read_at<uint32_t>(bytes, 48, "");
  d.rsrc2 = read_at<uint32_t>(bytes, 52, "");
  d.properties = read_at<uint16_t>(bytes, 56, "");
  d.kernarg_preload = read_at<uint16_t>(bytes, 58, "");
  return d;
}

ElfFile read_elf(std::span<const uint8_t> bytes, std::string_view want) {
  bytes = unbundle(bytes, want);
  Header header;
  const File file = open_file(bytes, header);
  ElfFile out;
  out.arch = arch_of(header.flags);
  load_segments(file, out);
  load_symbols(file, out);
  load_relocations(file, out);
  load_kernels(file, out);
  return out;
}

}  // namespace ark_emu
