// The implementations of CodeObject and LoadedCode.
#pragma once

#include <memory>
#include <string>

#include "elf.h"
#include "engine.h"
#include "memory.h"
#include "program.h"

namespace ark_emu {

class CodeObjectImpl : public CodeObject {
 public:
  explicit CodeObjectImpl(ElfFile elf);
  Arch arch() const override { return elf_.arch; }
  const std::vector<KernelInfo>& kernels() const override { return elf_.kernels; }
  const std::vector<SymbolInfo>& symbols() const override { return elf_.symbols; }
  const KernelInfo* find_kernel(std::string_view name) const override;
  std::string disassemble(std::string_view function) const override;
  const ElfFile& elf() const { return elf_; }
  Program& program() const { return *program_; }
  // Names an offset in the image as text, such as "function+0x1c".
  std::string describe(uint64_t offset) const;

 private:
  ElfFile elf_;
  std::unique_ptr<Program> program_;
};

class LoadedCodeImpl : public LoadedCode {
 public:
  // Maps the image to host memory, applies relocations, and registers the image as a region of
  // `memory`.
  LoadedCodeImpl(std::shared_ptr<CodeObjectImpl> code, std::shared_ptr<Memory> memory, int device);
  ~LoadedCodeImpl() override;
  const CodeObject& code() const override { return *code_; }
  int device() const override { return device_; }
  uint64_t image() const override { return image_; }
  uint64_t address_of(std::string_view symbol) const override;
  const std::shared_ptr<CodeObjectImpl>& object() const { return code_; }

 private:
  std::shared_ptr<CodeObjectImpl> code_;
  std::shared_ptr<Memory> memory_;
  int device_;
  uint64_t image_ = 0;
};

}  // namespace ark_emu
