// Handlers of gfx950's MFMA instructions for 8-bit and smaller formats. The modifiers cbsz and blgp
// name the formats of A and B: 8, 6 or 4 bits. If the instruction has four words, every 32 elements
// of K have a scale. CDNA4 instruction set document, sections "8-bit and smaller matrix operations
// and layouts", "MFMA with block exponent scaling".
#include "mfma.h"

namespace ark_emu {
namespace {

constexpr int kEach = 32;    // elements of A or B in a lane
constexpr int kBlock = 32;   // elements of K that share a scale

Small format_of(unsigned number) {
  constexpr Small kFormats[5] = {Small::E4M3, Small::E5M2, Small::E2M3, Small::E3M2, Small::E2M1};
  return kFormats[number];   // the decoder refuses others
}

// The index in K of element e of a lane in lane group `group`. A lane of 8-bit elements has two
// runs of 16 neighbouring elements, half of K apart. A lane of smaller elements has one run of 32.
template <int kDepth>
int position(int bits, int group, int e) {
  return bits == 8 ? 16 * group + e % 16 + e / 16 * (kDepth / 2) : kEach * group + e;
}

template <int kSize, int kDepth>
void load(Wave& w, const Operand& operand, Small format, double (&at)[kDepth][kSize]) {
  const int bits = small_bits(format);   // also the lane's number of dwords
  const float* table = small_table(format);
  const uint64_t mask = (1u << bits) - 1;
  for (int lane = 0; lane < 64; lane++) {
    uint32_t words[9] = {};
    for (int k = 0; k < bits; k++) words[k] = word_of(w, operand, k, lane);
    for (int e = 0; e < kEach; e++) {
      const int first = e * bits;
      const uint64_t pair = join(words[first / 32], words[first / 32 + 1]);
      const int k = position<kDepth>(bits, lane / kSize, e);
      at[k][lane % kSize] = table[(pair >> (first % 32)) & mask];
    }
  }
}

// Converts a scale of the format E8M0 (an exponent only) to a number: a power of two, or NaN.
double power(uint32_t exponent) {
  if (exponent == 0xff) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(1.0, static_cast<int>(exponent) - 127);
}

// The scales of A (which = 0) or B. Lane l has the scale of line l % kSize (a row of A or a column
// of B) and block l / kSize of K, in the byte that op_sel selects. If the operand is an inline
// constant (a float), the constant's exponent is the scale.
template <int kSize, int kDepth>
void load_scales(Wave& w, const Inst& scales, int which, double (&at)[kDepth / kBlock][kSize]) {
  const Operand& operand = scales.src[which];
  const int byte = ((scales.opsel >> which) & 1) + 2 * ((scales.opsel_hi >> which) & 1);
  const int shift = operand.kind == Kind::Vgpr ? 8 * byte : 23;
  for (int lane = 0; lane < 64; lane++) {
    at[lane / kSize][lane % kSize] = power((word_of(w, operand, 0, lane) >> shift) & 0xff);
  }
}

template <int kSize, int kDepth>
void multiply(Wave& w, const Inst& i) {
  constexpr int kBlocks = kDepth / kBlock;
  double a[kDepth][kSize], b[kDepth][kSize];
  load(w, i.src[0], format_of(i.cbsz), a);
  load(w, i.src[1], format_of(i.blgp), b);
  double sums[1][kSize][kSize] = {};
  if (i.second == nullptr) {
    multiply_add(a, b, kDepth, sums[0]);
    write_d(w, i, i.src[2], sums, 1);
    return;
  }
  double scale_a[kBlocks][kSize], scale_b[kBlocks][kSize];
  load_scales<kSize, kDepth>(w, *i.second, 0, scale_a);
  load_scales<kSize, kDepth>(w, *i.second, 1, scale_b);
  for (int block = 0; block < kBlocks; block++) {
    double part[kSize][kSize] = {};
    multiply_add(&a[block * kBlock], &b[block * kBlock], kBlock, part);
    for (int row = 0; row < kSize; row++) {
      for (int column = 0; column < kSize; column++) {
        const double scaled = part[row][column] * scale_a[block][row];
        sums[0][row][column] += scaled * scale_b[block][column];
      }
    }
  }
  write_d(w, i, i.src[2], sums, 1);
}

}  // namespace

void register_mfma_scale(Ops& ops) {
  for (const char* name : {"v_mfma_f32_16x16x128_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"}) {
    ops.add(name, "b128=b256,b256,b128", multiply<16, 128>, kMatrix);
  }
  for (const char* name : {"v_mfma_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_32x32x64_f8f6f4"}) {
    ops.add(name, "b512=b256,b256,b512", multiply<32, 64>, kMatrix);
  }
  // This instruction is valid only as the first half of a product with scales, so it has no
  // handler.
  ops.add("v_mfma_ld_scale_b32", "=f32,f32", nullptr, kMatrix);
}

}  // namespace ark_emu
