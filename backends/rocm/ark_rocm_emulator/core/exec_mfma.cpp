// MFMA of CDNA. Layouts from AMD's CDNA3 instruction set document, section "Matrix arithmetic", and
// AMD's matrix instruction calculator: lane l holds row (A) or column (B) l mod M of block
// (l / M) mod blocks, and the K elements of its group run through its registers. EXEC is ignored.
// Sums are formed in double and rounded once; the hardware's order of additions is not documented.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "grid.h"
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

// The element at position `e` of a lane's registers. kBits wide; `as_float` for the arithmetic.
struct InF16 {
  static constexpr int kBits = 16;
  static double value(Wave&, uint32_t bits) { return half_to_float(static_cast<uint16_t>(bits)); }
};
struct InBF16 {
  static constexpr int kBits = 16;
  static double value(Wave&, uint32_t bits) { return bf16_to_float(static_cast<uint16_t>(bits)); }
};
struct InF32 {
  static constexpr int kBits = 32;
  static double value(Wave&, uint32_t bits) { return as_float(bits); }
};
struct InXF32 {   // 10 bits of mantissa
  static constexpr int kBits = 32;
  static double value(Wave&, uint32_t bits) { return as_float(bits & 0xffffe000u); }
};
struct InI8 {
  static constexpr int kBits = 8;
  static int64_t value(Wave&, uint32_t bits) { return static_cast<int8_t>(bits); }
};

// gfx942 has the FNUZ flavour, gfx950 the one of the OCP standard.
bool fnuz(Wave& w) { return w.grid->program->arch() != Arch::gfx950; }

struct InFp8 {
  static constexpr int kBits = 8;
  static double value(Wave& w, uint32_t bits) {
    return fp8_to_float(static_cast<uint8_t>(bits), fnuz(w) ? Fp8::E4M3Fnuz : Fp8::E4M3Ocp);
  }
};
struct InBf8 {
  static constexpr int kBits = 8;
  static double value(Wave& w, uint32_t bits) {
    return fp8_to_float(static_cast<uint8_t>(bits), fnuz(w) ? Fp8::E5M2Fnuz : Fp8::E5M2Ocp);
  }
};

uint32_t word_of(Wave& w, const Operand& operand, int offset, int lane) {
  if (operand.kind == Kind::Vgpr) return w.row(operand.reg + static_cast<unsigned>(offset))[lane];
  return operand.lo;
}

// Which lane's B a lane uses: broadcasts and rotations between groups of lanes.
int swizzled(unsigned blgp, int lane) {
  switch (blgp) {
    case 1: return lane & 31;
    case 2: return lane | 32;
    case 3: return (lane + 16) & 63;
    case 4: case 5: case 6: case 7: return (lane & 15) + 16 * static_cast<int>(blgp - 4);
    default: return lane;
  }
}

template <int kSize, int kDepth, int kBlocks, class T>
struct Tiles {
  T at[kBlocks][kDepth][kSize];
};

template <class In, int kSize, int kDepth, int kBlocks, class T>
void load(Wave& w, const Inst& i, int k, Tiles<kSize, kDepth, kBlocks, T>& tiles) {
  constexpr int kEach = kSize * kDepth * kBlocks / 64, kPerWord = 32 / In::kBits;
  constexpr uint32_t kMask = In::kBits == 32 ? ~0u : (1u << (In::kBits & 31)) - 1;
  for (int lane = 0; lane < 64; lane++) {
    const int from = k == 1 ? swizzled(i.blgp, lane) : lane;
    const int line = lane % kSize, block = lane / kSize % kBlocks;
    const int depth = lane / kSize / kBlocks * kEach;
    for (int e = 0; e < kEach; e++) {
      const uint32_t word = word_of(w, i.src[k], e / kPerWord, from);
      const uint32_t bits = (word >> (In::kBits % 32 * (e % kPerWord))) & kMask;
      tiles.at[block][depth + e][line] = static_cast<T>(In::value(w, bits));
    }
  }
}

// Where register r of a lane lies in C and D.
struct Place {
  int block, row, column;
};

template <int kSize>
constexpr Place place(int reg, int lane) {
  if (kSize == 32) {
    const int r = reg % 16;
    return {reg / 16, 8 * (r / 4) + 4 * (lane / 32) + r % 4, lane % 32};
  }
  if (kSize == 16) return {reg / 4, 4 * (lane / 16) + reg % 4, lane % 16};
  return {lane / 4, reg, lane % 4};
}

// cbsz: A's block `abid` of every 2^cbsz blocks serves all of them.
int block_of_a(const Inst& i, int block) {
  const int group = (1 << i.cbsz) - 1;
  return (block & ~group) + (i.abid & group);
}

template <int kSize, int kDepth, int kBlocks, class A, class B>
void multiply(Wave& w, const Inst& i) {
  constexpr bool kInteger = std::is_same_v<A, InI8>;
  using T = std::conditional_t<kInteger, int64_t, double>;
  constexpr int kRegs = kSize * kSize * kBlocks / 64;
  Tiles<kSize, kDepth, kBlocks, T> a, b;
  load<A>(w, i, 0, a);
  load<B>(w, i, 1, b);
  T sums[kBlocks][kSize][kSize] = {};
  for (int block = 0; block < kBlocks; block++) {
    const auto& left = a.at[block_of_a(i, block)];
    for (int k = 0; k < kDepth; k++) {
      for (int row = 0; row < kSize; row++) {
        const T scale = left[k][row];
        for (int column = 0; column < kSize; column++) {
          sums[block][row][column] += scale * b.at[block][k][column];
        }
      }
    }
  }
  for (int reg = 0; reg < kRegs; reg++) {
    uint32_t out[64];
    for (int lane = 0; lane < 64; lane++) {
      const Place p = place<kSize>(reg, lane);
      const T sum = sums[p.block][p.row][p.column];
      const uint32_t c = word_of(w, i.src[2], reg, lane);
      if constexpr (kInteger) {
        const int64_t total = sum + static_cast<int32_t>(c);
        out[lane] = static_cast<uint32_t>(total);
      } else {
        out[lane] = as_bits(static_cast<float>(sum + as_float(c)));
      }
    }
    std::copy(out, out + 64, w.row(i.dst[0].reg + static_cast<unsigned>(reg)));
  }
}

// f64: one element a lane, other layouts, and blgp negates the operands.
template <int kSize, int kBlocks>
void multiply_f64(Wave& w, const Inst& i) {
  constexpr int kDepth = 4, kRegs = kSize * kSize * kBlocks / 64;
  const auto read = [&w, &i](int k, int reg, int lane) {
    const Operand& operand = i.src[k];
    double value = operand.kind == Kind::Vgpr
                       ? as_double(word_of(w, operand, 2 * reg, lane),
                                   word_of(w, operand, 2 * reg + 1, lane))
                       : as_double(operand.lo, operand.hi);
    return (i.blgp >> k) & 1 ? -value : value;
  };
  double a[kBlocks][kDepth][kSize], b[kBlocks][kDepth][kSize];
  for (int lane = 0; lane < 64; lane++) {
    const int line = lane % kSize, block = lane / kSize % kBlocks, k = lane / kSize / kBlocks;
    a[block][k][line] = read(0, 0, lane);
    b[block][k][line] = read(1, 0, lane);
  }
  double out[kRegs][64];
  for (int reg = 0; reg < kRegs; reg++) {
    for (int lane = 0; lane < 64; lane++) {
      const int column = lane % kSize, block = lane / kSize % kBlocks;
      const int row = 4 * reg + lane / 16;
      double sum = read(2, reg, lane);
      for (int k = 0; k < kDepth; k++) sum = std::fma(a[block][k][row], b[block][k][column], sum);
      out[reg][lane] = sum;
    }
  }
  for (int reg = 0; reg < kRegs; reg++) {
    uint32_t* low = w.row(i.dst[0].reg + 2u * static_cast<unsigned>(reg));
    for (int lane = 0; lane < 64; lane++) {
      const uint64_t bits = std::bit_cast<uint64_t>(out[reg][lane]);
      low[lane] = static_cast<uint32_t>(bits);
      low[kLanes + lane] = static_cast<uint32_t>(bits >> 32);
    }
  }
}

// gfx950: cbsz and blgp name the formats of A and B. 0 is E4M3, 1 is E5M2; the smaller ones are not
// here.
template <int kSize, int kDepth>
void multiply_f8(Wave& w, const Inst& i) {
  if (i.cbsz > 1 || i.blgp > 1) {
    throw Fault{ErrorKind::UnknownOpcode, "the emulator does not execute " + *i.name +
                                              " with 6-bit or 4-bit operands (cbsz " +
                                              std::to_string(i.cbsz) + ", blgp " +
                                              std::to_string(i.blgp) + ")"};
  }
  Inst plain = i;
  plain.cbsz = plain.blgp = 0;
  constexpr Handler kRun[2][2] = {
      {multiply<kSize, kDepth, 1, InFp8, InFp8>, multiply<kSize, kDepth, 1, InFp8, InBf8>},
      {multiply<kSize, kDepth, 1, InBf8, InFp8>, multiply<kSize, kDepth, 1, InBf8, InBf8>}};
  kRun[i.cbsz][i.blgp](w, plain);
}

std::string width(int dwords) {
  return dwords == 1 ? "b32" : "b" + std::to_string(32 * dwords);
}

template <int kSize, int kDepth, int kBlocks, class A, class B = A>
void add(Ops& ops, const std::string& name) {
  const int words = kSize * kDepth * kBlocks / 64 * A::kBits / 32;
  const std::string result = width(kSize * kSize * kBlocks / 64);
  ops.add(name, result + "=" + width(words) + "," + width(words) + "," + result,
          multiply<kSize, kDepth, kBlocks, A, B>, kNoModifiers);
}

template <int kSize, int kDepth>
void add_fp8(Ops& ops, const std::string& name) {
  add<kSize, kDepth, 1, InFp8, InFp8>(ops, name + "fp8_fp8");
  add<kSize, kDepth, 1, InFp8, InBf8>(ops, name + "fp8_bf8");
  add<kSize, kDepth, 1, InBf8, InFp8>(ops, name + "bf8_fp8");
  add<kSize, kDepth, 1, InBf8, InBf8>(ops, name + "bf8_bf8");
}

}  // namespace

void register_mfma(Ops& ops) {
  add<32, 1, 2, InF32>(ops, "v_mfma_f32_32x32x1_2b_f32");
  add<16, 1, 4, InF32>(ops, "v_mfma_f32_16x16x1_4b_f32");
  add<4, 1, 16, InF32>(ops, "v_mfma_f32_4x4x1_16b_f32");
  add<32, 2, 1, InF32>(ops, "v_mfma_f32_32x32x2_f32");
  add<16, 4, 1, InF32>(ops, "v_mfma_f32_16x16x4_f32");
  add<16, 8, 1, InXF32>(ops, "v_mfma_f32_16x16x8_xf32");
  add<32, 4, 1, InXF32>(ops, "v_mfma_f32_32x32x4_xf32");
  add<32, 4, 2, InF16>(ops, "v_mfma_f32_32x32x4_2b_f16");
  add<16, 4, 4, InF16>(ops, "v_mfma_f32_16x16x4_4b_f16");
  add<4, 4, 16, InF16>(ops, "v_mfma_f32_4x4x4_16b_f16");
  add<32, 8, 1, InF16>(ops, "v_mfma_f32_32x32x8_f16");
  add<16, 16, 1, InF16>(ops, "v_mfma_f32_16x16x16_f16");
  add<16, 32, 1, InF16>(ops, "v_mfma_f32_16x16x32_f16");
  add<32, 16, 1, InF16>(ops, "v_mfma_f32_32x32x16_f16");
  add<32, 4, 2, InBF16>(ops, "v_mfma_f32_32x32x4_2b_bf16");
  add<16, 4, 4, InBF16>(ops, "v_mfma_f32_16x16x4_4b_bf16");
  add<4, 4, 16, InBF16>(ops, "v_mfma_f32_4x4x4_16b_bf16");
  add<32, 8, 1, InBF16>(ops, "v_mfma_f32_32x32x8_bf16");
  add<16, 16, 1, InBF16>(ops, "v_mfma_f32_16x16x16_bf16");
  add<16, 32, 1, InBF16>(ops, "v_mfma_f32_16x16x32_bf16");
  add<32, 16, 1, InBF16>(ops, "v_mfma_f32_32x32x16_bf16");
  add<32, 4, 2, InI8>(ops, "v_mfma_i32_32x32x4_2b_i8");
  add<16, 4, 4, InI8>(ops, "v_mfma_i32_16x16x4_4b_i8");
  add<4, 4, 16, InI8>(ops, "v_mfma_i32_4x4x4_16b_i8");
  add<32, 16, 1, InI8>(ops, "v_mfma_i32_32x32x16_i8");
  add<16, 32, 1, InI8>(ops, "v_mfma_i32_16x16x32_i8");
  add<32, 32, 1, InI8>(ops, "v_mfma_i32_32x32x32_i8");
  add<16, 64, 1, InI8>(ops, "v_mfma_i32_16x16x64_i8");
  add_fp8<16, 32>(ops, "v_mfma_f32_16x16x32_");
  add_fp8<32, 16>(ops, "v_mfma_f32_32x32x16_");
  ops.add("v_mfma_f32_16x16x128_f8f6f4", "b128=b256,b256,b128", multiply_f8<16, 128>,
          kNoModifiers);
  ops.add("v_mfma_f32_32x32x64_f8f6f4", "b512=b256,b256,b512", multiply_f8<32, 64>, kNoModifiers);
  ops.add("v_mfma_f64_16x16x4_f64", "b256=f64,f64,b256", multiply_f64<16, 1>, kNoModifiers);
  ops.add("v_mfma_f64_4x4x4_4b_f64", "b64=f64,f64,b64", multiply_f64<4, 4>, kNoModifiers);
  // The second generation's forms with half the depth.
  add<32, 2, 2, InBF16>(ops, "v_mfma_f32_32x32x2bf16");
  add<16, 2, 4, InBF16>(ops, "v_mfma_f32_16x16x2bf16");
  add<4, 2, 16, InBF16>(ops, "v_mfma_f32_4x4x2bf16");
  add<32, 4, 1, InBF16>(ops, "v_mfma_f32_32x32x4bf16");
  add<16, 8, 1, InBF16>(ops, "v_mfma_f32_16x16x8bf16");
  add<32, 8, 1, InI8>(ops, "v_mfma_i32_32x32x8i8");
  add<16, 16, 1, InI8>(ops, "v_mfma_i32_16x16x16i8");
}

}  // namespace ark_emu
