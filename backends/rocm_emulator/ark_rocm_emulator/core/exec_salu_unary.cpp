// Handlers of scalar ALU instructions with one operand: SOP1, including the forms that save and
// change EXEC (the mask of active lanes).
#include <bit>
#include <string>

#include "ops.h"
#include "salu.h"

namespace ark_emu {
namespace {

// The handler of s_*_saveexec: the destination gets the old EXEC, and EXEC gets the result of F.
template <class T, class F>
Handler saveexec(F) {
  return [](Wave& w, const Inst& i) {
    const T source = scalar<T>(w, i.src[0]), old = static_cast<T>(w.exec());
    put_scalar(w, i.dst[0], old);
    const T r = F{}(source, old);
    w.set_exec(r);
    w.scc = r != 0;
  };
}

// The handler of s_*_wrexec: EXEC and the destination both get the result of F.
template <class T, class F>
Handler wrexec(F) {
  return [](Wave& w, const Inst& i) {
    const T r = F{}(scalar<T>(w, i.src[0]), static_cast<T>(w.exec()));
    w.set_exec(r);
    put_scalar(w, i.dst[0], r);
    w.scc = r != 0;
  };
}

U32 quad_any(U32 bits, int lanes_of_result) {
  U32 r = 0;
  for (int q = 0; q < 8; q++) {
    if (((bits >> (4 * q)) & 0xf) == 0) continue;
    r |= lanes_of_result == 4 ? 0xfu << (4 * q) : 1u << q;
  }
  return r;
}

}  // namespace

void register_salu_unary(Ops& ops) {
  ops.add("s_mov_b32", "b32=b32", scalar1<U32, false>([](U32 a) { return a; }));
  ops.add("s_mov_b64", "b64=b64", scalar1<U64, false>([](U64 a) { return a; }));
  ops.add("s_cmov_b32", "b32=b32", [](Wave& w, const Inst& i) {
    if (w.scc) w.put_scalar32(i.dst[0], w.scalar32(i.src[0]));
  });
  ops.add("s_cmov_b64", "b64=b64", [](Wave& w, const Inst& i) {
    if (w.scc) w.put_scalar64(i.dst[0], w.scalar64(i.src[0]));
  });
  ops.add("s_not_b32", "b32=b32", scalar1<U32, true>([](U32 a) { return ~a; }));
  ops.add("s_not_b64", "b64=b64", scalar1<U64, true>([](U64 a) { return ~a; }));
  ops.add("s_wqm_b32", "b32=b32", scalar1<U32, true>([](U32 a) { return quad_any(a, 4); }));
  ops.add("s_wqm_b64", "b64=b64", scalar1<U64, true>([](U64 a) {
            return quad_any(U32(a), 4) | U64(quad_any(U32(a >> 32), 4)) << 32;
          }));
  ops.add("s_quadmask_b32", "b32=b32", scalar1<U32, true>([](U32 a) { return quad_any(a, 1); }));
  ops.add("s_quadmask_b64", "b64=b64", scalar1<U64, true>([](U64 a) {
            return quad_any(U32(a), 1) | U64(quad_any(U32(a >> 32), 1)) << 8;
          }));
  const auto reverse = [](U32 a) {
    U32 r = 0;
    for (int b = 0; b < 32; b++) r |= ((a >> b) & 1) << (31 - b);
    return r;
  };
  ops.add("s_brev_b32", "b32=b32", scalar1<U32, false>(reverse));
  ops.add("s_brev_b64", "b64=b64", scalar1<U64, false>([](U64 a) {
            U64 r = 0;
            for (int b = 0; b < 64; b++) r |= ((a >> b) & 1) << (63 - b);
            return r;
          }));
  const auto count32 = [&ops](const char* name, Handler run) { ops.add(name, "b32=b32", run); };
  count32("s_bcnt0_i32_b32", scalar1<U32, true>([](U32 a) { return U32(std::popcount(~a)); }));
  count32("s_bcnt1_i32_b32", scalar1<U32, true>([](U32 a) { return U32(std::popcount(a)); }));
  ops.add("s_bcnt0_i32_b64", "b32=b64",
          scalar1<U64, true>([](U64 a) { return U32(std::popcount(~a)); }));
  ops.add("s_bcnt1_i32_b64", "b32=b64",
          scalar1<U64, true>([](U64 a) { return U32(std::popcount(a)); }));
  count32("s_ff0_i32_b32",
          scalar1<U32, false>([](U32 a) { return a == ~0u ? ~0u : U32(std::countr_one(a)); }));
  count32("s_ff1_i32_b32",
          scalar1<U32, false>([](U32 a) { return a == 0 ? ~0u : U32(std::countr_zero(a)); }));
  count32("s_flbit_i32_b32",
          scalar1<U32, false>([](U32 a) { return a == 0 ? ~0u : U32(std::countl_zero(a)); }));
  count32("s_flbit_i32", scalar1<U32, false>([](U32 a) {
            const U32 flipped = I32(a) < 0 ? ~a : a;
            return flipped == 0 ? ~0u : U32(std::countl_zero(flipped));
          }));
  ops.add("s_ff0_i32_b64", "b32=b64",
          scalar1<U64, false>([](U64 a) { return a == ~0ull ? ~0u : U32(std::countr_one(a)); }));
  ops.add("s_ff1_i32_b64", "b32=b64",
          scalar1<U64, false>([](U64 a) { return a == 0 ? ~0u : U32(std::countr_zero(a)); }));
  ops.add("s_flbit_i32_b64", "b32=b64",
          scalar1<U64, false>([](U64 a) { return a == 0 ? ~0u : U32(std::countl_zero(a)); }));
  ops.add("s_flbit_i32_i64", "b32=i64", scalar1<U64, false>([](U64 a) {
            const U64 flipped = I64(a) < 0 ? ~a : a;
            return flipped == 0 ? ~0u : U32(std::countl_zero(flipped));
          }));
  ops.add("s_sext_i32_i8", "i32=i32",
          scalar1<U32, false>([](U32 a) { return U32(I32(int8_t(a))); }));
  ops.add("s_sext_i32_i16", "i32=i32",
          scalar1<U32, false>([](U32 a) { return U32(I32(int16_t(a))); }));
  ops.add("s_abs_i32", "i32=i32",
          scalar1<U32, true>([](U32 a) { return I32(a) < 0 ? 0u - a : a; }));
  ops.add("s_bitset0_b32", "b32=b32", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], w.scalar32(i.dst[0]) & ~(1u << (w.scalar32(i.src[0]) & 31)));
  });
  ops.add("s_bitset1_b32", "b32=b32", [](Wave& w, const Inst& i) {
    w.put_scalar32(i.dst[0], w.scalar32(i.dst[0]) | 1u << (w.scalar32(i.src[0]) & 31));
  });
  ops.add("s_bitset0_b64", "b64=b32", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.scalar64(i.dst[0]) & ~(1ull << (w.scalar32(i.src[0]) & 63)));
  });
  ops.add("s_bitset1_b64", "b64=b32", [](Wave& w, const Inst& i) {
    w.put_scalar64(i.dst[0], w.scalar64(i.dst[0]) | 1ull << (w.scalar32(i.src[0]) & 63));
  });
  ops.add("s_bitreplicate_b64_b32", "b64=b32", [](Wave& w, const Inst& i) {
    const U32 a = w.scalar32(i.src[0]);
    U64 r = 0;
    for (int b = 0; b < 32; b++) r |= U64((a >> b) & 1) * 3 << (2 * b);
    w.put_scalar64(i.dst[0], r);
  });
  const auto save = [&ops](const std::string& name, auto f) {
    using F = decltype(f);
    ops.add(name + "_saveexec_b32", "b32=b32", saveexec<U32>(F{}), kWritesExec);
    ops.add(name + "_saveexec_b64", "b64=b64", saveexec<U64>(F{}), kWritesExec);
  };
  each_bit_operation(save);
  const auto andn1 = [](auto a, auto e) { return ~a & e; };
  const auto andn2 = [](auto a, auto e) { return a & ~e; };
  save("s_andn1", andn1);
  save("s_orn1", [](auto a, auto e) { return ~a | e; });
  ops.add("s_andn1_wrexec_b32", "b32=b32", wrexec<U32>(andn1), kWritesExec);
  ops.add("s_andn1_wrexec_b64", "b64=b64", wrexec<U64>(andn1), kWritesExec);
  ops.add("s_andn2_wrexec_b32", "b32=b32", wrexec<U32>(andn2), kWritesExec);
  ops.add("s_andn2_wrexec_b64", "b64=b64", wrexec<U64>(andn2), kWritesExec);
}

}  // namespace ark_emu
