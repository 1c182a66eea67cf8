#include "ops.h"

#include <array>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace ark_emu {
namespace {

struct TypeName {
  const char* name;
  Ty ty;
  int dwords;
};

constexpr std::array<TypeName, 32> kTypes = {{
    {"b16", Ty::B16, 1},     {"i16", Ty::I16, 1},       {"u16", Ty::U16, 1},
    {"f16", Ty::F16, 1},     {"bf16", Ty::BF16, 1},     {"b32", Ty::B32, 1},
    {"i32", Ty::I32, 1},     {"u32", Ty::U32, 1},       {"f32", Ty::F32, 1},
    {"b64", Ty::B64, 2},     {"i64", Ty::I64, 2},       {"u64", Ty::U64, 2},
    {"f64", Ty::F64, 2},     {"pk16", Ty::Pk16, 1},     {"pkf16", Ty::PkF16, 1},
    {"pkf32", Ty::PkF32, 2}, {"m", Ty::Mask, 2},        {"s", Ty::Scalar, 1},
    {"tied", Ty::Tied, 1},   {"lit", Ty::Literal, 1},   {"p", Ty::Ptr, 2},
    {"b96", Ty::B96, 3},     {"b128", Ty::B128, 4},     {"b160", Ty::B160, 5},
    {"b192", Ty::B192, 6},   {"b256", Ty::B256, 8},     {"b512", Ty::B512, 16},
    {"b1024", Ty::B1024, 32},
}};

Ty parse_type(std::string_view text) {
  if (text.empty()) return Ty::None;   // a field that the operation does not use
  for (const TypeName& type : kTypes) {
    if (type.name != nullptr && text == type.name) return type.ty;
  }
  throw std::logic_error("operand type '" + std::string(text) + "' is not known");
}

int parse_list(std::string_view text, Ty* out, int limit) {
  int count = 0;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    if (count == limit) throw std::logic_error("too many operands");
    out[count++] = parse_type(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return count;
}

}  // namespace

int ty_dwords(Ty ty) {
  for (const TypeName& type : kTypes) {
    if (type.name != nullptr && type.ty == ty) return type.dwords;
  }
  return 0;
}

void Ops::add(std::string_view name, std::string_view signature, const Handlers& handlers,
              uint32_t flags) {
  OpInfo info;
  info.name = name;
  info.handlers = handlers;
  info.flags = flags;
  const size_t equals = signature.find('=');
  if (equals == std::string_view::npos) throw std::logic_error("signature without '='");
  info.dst_count = static_cast<uint8_t>(parse_list(signature.substr(0, equals), info.dst, 2));
  info.src_count = static_cast<uint8_t>(parse_list(signature.substr(equals + 1), info.src, 4));
  if (!ops_.emplace(info.name, std::move(info)).second) {
    throw std::logic_error("operation registered twice: " + std::string(name));
  }
}

const OpInfo* Ops::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = ops_.find(std::string(name));
  return found == ops_.end() ? nullptr : &found->second;
}

const OpInfo* Ops::named_only(std::string_view name) {
  const std::lock_guard lock(mutex_);
  OpInfo info;
  info.name = name;
  return &ops_.emplace(info.name, std::move(info)).first->second;
}

Ops& Ops::all() {
  static Ops& ops = *new Ops;   // never destroyed: grids may still run when the process ends
  static std::once_flag once;
  std::call_once(once, [] {
    for (auto add : {register_salu, register_salu_unary, register_sopp, register_valu_f32,
                     register_valu_f16, register_valu_f64, register_valu_int, register_valu_wide,
                     register_valu_cmp, register_valu_cvt, register_valu_rare, register_cvt_scale, register_vop3p,
                     register_dot, register_cross, register_mfma, register_smem, register_lds,
                     register_mem, register_buffer, register_gfx11}) {
      add(ops);
    }
  });
  return ops;
}

}  // namespace ark_emu
