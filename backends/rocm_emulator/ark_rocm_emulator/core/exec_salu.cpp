// Handlers of scalar ALU instructions with two operands: SOP2, SOPC and the arithmetic of SOPK.
// Semantics from the "SOP" chapters of AMD's CDNA3 and RDNA3 instruction set documents.
#include <bit>
#include <string>

#include "ops.h"
#include "salu.h"

namespace ark_emu {
namespace {

// The handler of an operation on two scalar sources of 32 bits. F itself sets SCC.
template <class F>
Handler carry32(F) {
  return [](Wave& w, const Inst& i) {
    bool scc = w.scc;
    const U32 r = F{}(w.scalar32(i.src[0]), w.scalar32(i.src[1]), scc);
    w.put_scalar32(i.dst[0], r);
    w.scc = scc;
  };
}

template <class F>
Handler compare32(F) {
  return [](Wave& w, const Inst& i) { w.scc = F{}(w.scalar32(i.src[0]), w.scalar32(i.src[1])); };
}

// The handler of a SOPK comparison of a register with the instruction's 16-bit immediate.
template <class F>
Handler compare_imm(F) {
  return [](Wave& w, const Inst& i) { w.scc = F{}(w.scalar32(i.src[0]), i.imm); };
}

U32 field_mask(U32 width) { return width >= 32 ? ~0u : (1u << width) - 1; }
U64 field_mask64(U32 width) { return width >= 64 ? ~0ull : (1ull << width) - 1; }

U32 bfe_signed(U32 a, U32 b) {
  const U32 offset = b & 31, width = (b >> 16) & 0x7f;
  if (width == 0) return 0;
  const U32 value = static_cast<U32>(static_cast<I32>(a) >> offset);
  if (width >= 32) return value;
  return static_cast<U32>(static_cast<I32>(value << (32 - width)) >> (32 - width));
}

U64 bfe_signed64(U64 a, U32 b) {
  const U32 offset = b & 63, width = (b >> 16) & 0x7f;
  if (width == 0) return 0;
  const I64 value = static_cast<I64>(a) >> offset;
  if (width >= 64) return static_cast<U64>(value);
  return static_cast<U64>(static_cast<I64>(static_cast<U64>(value) << (64 - width)) >>
                          (64 - width));
}

U32 add_signed(U32 a, U32 b, bool& scc) {
  const U32 r = a + b;
  scc = ((~(a ^ b) & (a ^ r)) >> 31) != 0;
  return r;
}

void register_sop2(Ops& ops) {
  const auto add32 = [](U32 a, U32 b, bool& scc) {
    const U32 r = a + b;
    scc = r < a;
    return r;
  };
  ops.add("s_add_u32", "b32=b32,b32", carry32(add32));
  ops.add("s_sub_u32", "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
            scc = b > a;
            return a - b;
          }));
  ops.add("s_add_i32", "i32=i32,i32",
          carry32([](U32 a, U32 b, bool& scc) { return add_signed(a, b, scc); }));
  ops.add("s_sub_i32", "i32=i32,i32", carry32([](U32 a, U32 b, bool& scc) {
            const U32 r = a - b;
            scc = (((a ^ b) & (a ^ r)) >> 31) != 0;
            return r;
          }));
  ops.add("s_addc_u32", "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
            const U64 r = U64(a) + b + (scc ? 1 : 0);
            scc = (r >> 32) != 0;
            return static_cast<U32>(r);
          }));
  ops.add("s_subb_u32", "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
            const U64 taken = U64(b) + (scc ? 1 : 0);
            scc = taken > a;
            return a - static_cast<U32>(taken);
          }));
  ops.add("s_min_i32", "i32=i32,i32", carry32([](U32 a, U32 b, bool& scc) {
            scc = I32(a) < I32(b);
            return scc ? a : b;
          }));
  ops.add("s_min_u32", "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
            scc = a < b;
            return scc ? a : b;
          }));
  ops.add("s_max_i32", "i32=i32,i32", carry32([](U32 a, U32 b, bool& scc) {
            scc = I32(a) >= I32(b);
            return scc ? a : b;
          }));
  ops.add("s_max_u32", "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
            scc = a >= b;
            return scc ? a : b;
          }));
  ops.add("s_cselect_b32", "b32=b32,b32",
          carry32([](U32 a, U32 b, bool& scc) { return scc ? a : b; }));
  ops.add("s_cselect_b64", "b64=b64,b64", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.scalar64(i.src[w.scc ? 0 : 1]));
  });
  each_bit_operation([&ops](const std::string& name, auto f) {
    using F = decltype(f);
    ops.add(name + "_b32", "b32=b32,b32", scalar2<U32, U32, true>(F{}));
    ops.add(name + "_b64", "b64=b64,b64", scalar2<U64, U64, true>(F{}));
  });
  ops.add("s_lshl_b32", "b32=b32,b32",
          scalar2<U32, U32, true>([](U32 a, U32 b) { return a << (b & 31); }));
  ops.add("s_lshr_b32", "b32=b32,b32",
          scalar2<U32, U32, true>([](U32 a, U32 b) { return a >> (b & 31); }));
  ops.add("s_ashr_i32", "i32=i32,b32",
          scalar2<U32, U32, true>([](U32 a, U32 b) {
            return static_cast<U32>(I32(a) >> (b & 31));
          }));
  ops.add("s_lshl_b64", "b64=b64,b32",
          scalar2<U64, U32, true>([](U64 a, U32 b) { return a << (b & 63); }));
  ops.add("s_lshr_b64", "b64=b64,b32",
          scalar2<U64, U32, true>([](U64 a, U32 b) { return a >> (b & 63); }));
  ops.add("s_ashr_i64", "i64=i64,b32",
          scalar2<U64, U32, true>([](U64 a, U32 b) {
            return static_cast<U64>(I64(a) >> (b & 63));
          }));
  ops.add("s_bfm_b32", "b32=b32,b32",
          scalar2<U32, U32, false>([](U32 a, U32 b) {
            return ((1u << (a & 31)) - 1) << (b & 31);
          }));
  ops.add("s_bfm_b64", "b64=b32,b32", scalar2<U32, U32, false>([](U32 a, U32 b) -> U64 {
            return ((1ull << (a & 63)) - 1) << (b & 63);
          }));
  ops.add("s_mul_i32", "i32=i32,i32", scalar2<U32, U32, false>([](U32 a, U32 b) { return a * b; }));
  ops.add("s_mul_hi_u32", "b32=b32,b32",
          scalar2<U32, U32, false>([](U32 a, U32 b) {
            return static_cast<U32>(U64(a) * b >> 32);
          }));
  ops.add("s_mul_hi_i32", "i32=i32,i32", scalar2<U32, U32, false>([](U32 a, U32 b) {
            return static_cast<U32>(I64(I32(a)) * I64(I32(b)) >> 32);
          }));
  ops.add("s_bfe_u32", "b32=b32,b32", scalar2<U32, U32, true>([](U32 a, U32 b) {
            return (a >> (b & 31)) & field_mask((b >> 16) & 0x7f);
          }));
  ops.add("s_bfe_i32", "i32=i32,b32",
          scalar2<U32, U32, true>([](U32 a, U32 b) { return bfe_signed(a, b); }));
  ops.add("s_bfe_u64", "b64=b64,b32", scalar2<U64, U32, true>([](U64 a, U32 b) {
            return (a >> (b & 63)) & field_mask64((b >> 16) & 0x7f);
          }));
  ops.add("s_bfe_i64", "i64=i64,b32",
          scalar2<U64, U32, true>([](U64 a, U32 b) { return bfe_signed64(a, b); }));
  ops.add("s_absdiff_i32", "i32=i32,i32", scalar2<U32, U32, true>([](U32 a, U32 b) {
            const U32 r = a - b;   // wraps around; then the sign is tested
            return I32(r) < 0 ? 0u - r : r;
          }));
  const auto add_shifted = [&ops](const char* name, auto shift) {
    ops.add(name, "b32=b32,b32", carry32([](U32 a, U32 b, bool& scc) {
              const U64 r = (U64(a) << decltype(shift)::value) + b;
              scc = (r >> 32) != 0;
              return static_cast<U32>(r);
            }));
  };
  add_shifted("s_lshl1_add_u32", std::integral_constant<int, 1>());
  add_shifted("s_lshl2_add_u32", std::integral_constant<int, 2>());
  add_shifted("s_lshl3_add_u32", std::integral_constant<int, 3>());
  add_shifted("s_lshl4_add_u32", std::integral_constant<int, 4>());
  ops.add("s_pack_ll_b32_b16", "b32=b32,b32",
          scalar2<U32, U32, false>([](U32 a, U32 b) { return (a & 0xffff) | b << 16; }));
  ops.add("s_pack_lh_b32_b16", "b32=b32,b32",
          scalar2<U32, U32, false>([](U32 a, U32 b) { return (a & 0xffff) | (b & 0xffff0000); }));
  ops.add("s_pack_hh_b32_b16", "b32=b32,b32",
          scalar2<U32, U32, false>([](U32 a, U32 b) { return a >> 16 | (b & 0xffff0000); }));
}

void register_compares(Ops& ops) {
  const auto add = [&ops](const char* name, Handler sopc, Handler sopk, bool is_signed) {
    const std::string type = is_signed ? "_i32" : "_u32";
    ops.add("s_cmp_" + std::string(name) + type, is_signed ? "=i32,i32" : "=u32,u32", sopc);
    ops.add("s_cmpk_" + std::string(name) + type, is_signed ? "=i32" : "=u32", sopk);
  };
  const auto pair = [&add](const char* name, auto f) {
    using F = decltype(f);
    add(name, compare32([](U32 a, U32 b) { return F{}(I32(a), I32(b)); }),
        compare_imm([](U32 a, I32 imm) { return F{}(I32(a), imm); }), true);
    add(name, compare32([](U32 a, U32 b) { return F{}(a, b); }),
        compare_imm([](U32 a, I32 imm) { return F{}(a, U32(uint16_t(imm))); }), false);
  };
  pair("eq", [](auto a, auto b) { return a == b; });
  pair("lg", [](auto a, auto b) { return a != b; });
  pair("gt", [](auto a, auto b) { return a > b; });
  pair("ge", [](auto a, auto b) { return a >= b; });
  pair("lt", [](auto a, auto b) { return a < b; });
  pair("le", [](auto a, auto b) { return a <= b; });
  ops.add("s_bitcmp0_b32", "=b32,b32",
          compare32([](U32 a, U32 b) { return ((a >> (b & 31)) & 1) == 0; }));
  ops.add("s_bitcmp1_b32", "=b32,b32",
          compare32([](U32 a, U32 b) { return ((a >> (b & 31)) & 1) != 0; }));
  ops.add("s_bitcmp0_b64", "=b64,b32", [](Wave& w, const Inst& i) {
    w.scc = ((w.scalar64(i.src[0]) >> (w.scalar32(i.src[1]) & 63)) & 1) == 0;
  });
  ops.add("s_bitcmp1_b64", "=b64,b32", [](Wave& w, const Inst& i) {
    w.scc = ((w.scalar64(i.src[0]) >> (w.scalar32(i.src[1]) & 63)) & 1) != 0;
  });
  ops.add("s_cmp_eq_u64", "=u64,u64",
          [](Wave& w, const Inst& i) { w.scc = w.scalar64(i.src[0]) == w.scalar64(i.src[1]); });
  ops.add("s_cmp_lg_u64", "=u64,u64",
          [](Wave& w, const Inst& i) { w.scc = w.scalar64(i.src[0]) != w.scalar64(i.src[1]); });
  ops.add("s_movk_i32", "i32=",
          [](Wave& w, const Inst& i) { w.put_scalar32(i.dst[0], U32(i.imm)); });
  ops.add("s_cmovk_i32", "i32=", [](Wave& w, const Inst& i) {
    if (w.scc) w.put_scalar32(i.dst[0], U32(i.imm));
  });
  ops.add("s_addk_i32", "i32=", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], add_signed(w.scalar32(i.dst[0]), U32(i.imm), w.scc));
  });
  ops.add("s_mulk_i32", "i32=", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], w.scalar32(i.dst[0]) * U32(i.imm));
  });
}

}  // namespace

void register_salu(Ops& ops) {
  register_sop2(ops);
  register_compares(ops);
}

}  // namespace ark_emu
