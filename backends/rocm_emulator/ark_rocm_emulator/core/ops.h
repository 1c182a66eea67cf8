// The registry of operations. It maps a name to the signature, flags and handlers of an operation.
// The register_... functions of the exec_*.cpp files fill it once per process. The opcode tables of
// the architectures refer to its names.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "inst.h"

namespace ark_emu {

class Ops {
 public:
  // Adds an operation. signature: "dst[,dst]=src[,src...]" in the type names of README.md; either
  // side may be empty.
  void add(std::string_view name, std::string_view signature, const Handlers& handlers,
           uint32_t flags = 0);
  const OpInfo* find(std::string_view name) const;   // null if unknown
  // Registers an operation that is known by name only: it can be decoded and printed, but not run.
  const OpInfo* named_only(std::string_view name);

  static Ops& all();

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, OpInfo> ops_;
};

void register_salu(Ops&);
void register_salu_unary(Ops&);
void register_sopp(Ops&);
void register_valu_f32(Ops&);
void register_valu_f16(Ops&);
void register_valu_f64(Ops&);
void register_valu_int(Ops&);
void register_valu_wide(Ops&);
void register_valu_cmp(Ops&);
void register_valu_cvt(Ops&);
void register_valu_rare(Ops&);
void register_cvt_scale(Ops&);
void register_vop3p(Ops&);
void register_dot(Ops&);
void register_cross(Ops&);
void register_mfma(Ops&);
void register_smem(Ops&);
void register_lds(Ops&);
void register_mem(Ops&);
void register_buffer(Ops&);
void register_gfx11(Ops&);   // operations that only RDNA3 has (WMMA, VOPD, ...)

}  // namespace ark_emu
