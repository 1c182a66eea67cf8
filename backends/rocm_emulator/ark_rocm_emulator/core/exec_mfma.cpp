// Handlers of CDNA's MFMA instructions for dense matrices whose elements all have the same width.
// Lane l holds row (A) or column (B) l mod M of block (l / M) mod blocks. The lane's registers hold
// consecutive elements along K (mfma.h names the documents).
#include <bit>
#include <cstdlib>
#include <cstring>

#include "mfma.h"
#include "widened.h"

namespace ark_emu {
namespace {

// Returns the lane whose part of B a lane uses. The modifier blgp selects broadcasts and rotations
// between groups of lanes.
int swizzled(unsigned blgp, int lane) {
  switch (blgp) {
    case 1: return lane & 31;
    case 2: return lane | 32;
    case 3: return (lane + 16) & 63;
    case 4: case 5: case 6: case 7: return (lane & 15) + 16 * static_cast<int>(blgp - 4);
    default: return lane;
  }
}

// The depth of an instruction's matrices, and the number of matrices that it multiplies.
struct Shape {
  int depth, blocks;
};

constexpr int kMostElements = 1024;   // of A or B

// The rows of a matrix A or B in all of its blocks. Row `block * depth + d` holds the elements at
// place d along K, of all lines of a block; a line is a row of A or a column of B.
template <int kSize, class T>
using Lines = const T (*)[kSize];

// Converts source number k of the instruction (0: A, 1: B) to the type T.
template <int kSize, class In, class T>
[[gnu::noinline]] void widen(Wave& w, const Inst& i, int k, Shape shape, T (*to_lines)[kSize]) {
  constexpr int kPerWord = 32 / In::kBits, kGroups = 64 / kSize;
  const int each = kSize * shape.depth * shape.blocks / 64;   // elements of a lane
  alignas(64) uint32_t constant[kLanes], moved[kLanes];
  T* first[kGroups];   // by group of lanes with the same block and place along K
  for (int group = 0; group < kGroups; group++) {
    const int block = group % shape.blocks, deep = group / shape.blocks * each;
    first[group] = to_lines[block * shape.depth + deep];
  }
  for (int reg = 0; reg < each / kPerWord; reg++) {
    const uint32_t* words = words_of(w, i.src[k], reg, constant);
    if (k == 1 && i.blgp != 0) {
      for (int lane = 0; lane < 64; lane++) moved[lane] = words[swizzled(i.blgp, lane)];
      words = moved;
    }
    for (int group = 0; group < kGroups; group++) {
      const uint32_t* from = words + group * kSize;
      T* to = first[group] + reg * kPerWord * kSize;
      if constexpr (In::kBits == 16) {
        In::widen_both(w, from, kSize, to, to + kSize);
      } else {
        for (int e = 0; e < kPerWord; e++) In::widen(w, from, In::kBits * e, kSize, to + e * kSize);
      }
    }
  }
}

// Returns source number k after conversion. If a preceding MFMA has converted the same registers,
// that result is returned. A source that is not kept for later ones is put into `unshared`.
template <int kSize, class In>
[[gnu::noinline]] Widened& load(Wave& w, const Inst& i, int k, Shape shape, Widened& unshared) {
  const Operand& operand = i.src[k];
  const int elements = kSize * shape.depth * shape.blocks;
  Widened* place = &unshared;
  if (operand.kind == Kind::Vgpr && (k == 0 || i.blgp == 0)) {
    const int regs = elements / kLanes * In::kBits / 32;
    place = &widened(w, k, operand.reg, regs);
    const auto maker = reinterpret_cast<Widened::Maker>(widen<kSize, In, float>);
    const Widened::Kind kind = {maker, shape.depth, shape.blocks, w.mode & 0x10};
    if (place->holds(kind, w.row(operand.reg), 1, regs * kLanes, 0)) return *place;
  }
  const bool in_pairs = kInPairs<kSize> && shape.depth % 2 == 0;
  place->fill<kSize>(elements, in_pairs, [&](auto* to) { widen<kSize, In>(w, i, k, shape, to); });
  return *place;
}

// The block of A that block `block` of the product uses. With the modifier cbsz, one block (abid)
// of every group of 2^cbsz blocks is used for the whole group.
int block_of_a(const Inst& i, int block) {
  const int group = (1 << i.cbsz) - 1;
  return (block & ~group) + (i.abid & group);
}

// Returns the `regs` rows (registers) of C. If C and D overlap, these are in `copy`, so that rows
// of D may be written at any time.
const uint32_t* rows_of_c(Wave& w, const Inst& i, int regs, uint32_t* copy) {
  const Operand& c = i.src[2];
  if (c.kind != Kind::Vgpr) {
    fill_row(copy, c.lo, regs * kLanes);
    return copy;
  }
  const int apart = std::abs(int{c.reg} - int{i.dst[0].reg});
  if (apart == 0 || apart >= regs) return w.row(c.reg);
  std::memcpy(copy, w.row(c.reg), sizeof(uint32_t) * kLanes * static_cast<size_t>(regs));
  return copy;
}

#if defined(ARK_PAIRS)
// Computes D = C + A * B for operands that are small integers. The sums are exact in any order, so
// that the result is the same as in double. A sum of zeros is positive there too.
template <int kSize, class Unit>
[[gnu::noinline]] void multiply_integers(Wave& w, const Inst& i, Shape shape, const Integers& a,
                                         const Integers& b, Unit unit) {
  constexpr int kMostBlocks = 64 / kSize;
  alignas(64) uint32_t copy[kSize * kSize * kMostBlocks];
  const uint32_t* c = rows_of_c(w, i, kSize * kSize * shape.blocks / 64, copy);
  uint32_t* d = w.row(i.dst[0].reg);
  const Lines<kSize, uint32_t> left = a.rows<kSize>(), right = b.rows<kSize>();
  const int depth = shape.depth / 2;
  for (int block = 0; block < shape.blocks; block++) {
    multiply<kSize>(
        left + block_of_a(i, block) * depth, right + block * depth, depth,
        [](int, int) { return no_pairs(); },
        [=](int row, int column, Pairs sum) {
          const int at = word_in_d<kSize>(block, row) + column;
          add_sums(d + at, sum, unit, c + at);
        });
  }
}

#endif

// Computes D = C + A * B. Each sum is rounded once, when it is complete.
template <int kSize>
[[gnu::noinline]] void multiply_doubles(Wave& w, const Inst& i, Shape shape, Lines<kSize, double> a,
                                        Lines<kSize, double> b) {
  constexpr int kMostBlocks = 64 / kSize;
  alignas(64) uint32_t copy[kSize * kSize * kMostBlocks];
  const uint32_t* c = rows_of_c(w, i, kSize * kSize * shape.blocks / 64, copy);
  uint32_t* d = w.row(i.dst[0].reg);
  for (int block = 0; block < shape.blocks; block++) {
    multiply<kSize>(
        a + block_of_a(i, block) * shape.depth, b + block * shape.depth, shape.depth,
        [](int, int) { return spread(0.0); },
        [=](int row, int column, Doubles sum) {
          const int at = word_in_d<kSize>(block, row) + column;
          to_floats(d + at, sum + from_floats(c + at));
        });
  }
}

// The same for all types and sizes, and for modes in which results are not only rounded.
template <int kSize, class T>
[[gnu::noinline]] void multiply_to_d(Wave& w, const Inst& i, Shape shape, Lines<kSize, T> a,
                                     Lines<kSize, T> b, bool flushes) {
  constexpr int kMostBlocks = 64 / kSize;
  alignas(64) T sums[kMostBlocks][kSize][kSize] = {};
  for (int block = 0; block < shape.blocks; block++) {
    multiply_add(a + block_of_a(i, block) * shape.depth, b + block * shape.depth, shape.depth,
                 sums[block]);
  }
  if (flushes) {
    write_with(w, i, i.src[2], sums, shape.blocks, [](T sum, uint32_t addend) {
      return without_denormal(total(sum, without_denormal(addend)));
    });
  } else {
    write_d(w, i, i.src[2], sums, shape.blocks);
  }
}

// Chooses the fastest of these functions.
template <int kSize>
[[gnu::noinline]] void multiply_floats(Wave& w, const Inst& i, Shape shape, Widened& a, Widened& b,
                                       bool flushes) {
  const bool rounds_only = kSize % kDoubles == 0 && !flushes && !saturates(w);
#if defined(ARK_PAIRS)
  if constexpr (kInPairs<kSize>) {
    if (rounds_only && a.integers.exact && b.integers.exact) {
      const int unit = a.integers.unit + b.integers.unit;
      const int bits = a.integers.bits + b.integers.bits +
                       std::bit_width(static_cast<unsigned>(shape.depth) - 1);
      // If a sum is exact as a float, then float arithmetic rounds it and C once, too.
      if (bits <= 24 && unit >= -149 && unit + bits <= 127) {
        multiply_integers<kSize>(w, i, shape, a.integers, b.integers, std::ldexp(1.0f, unit));
      } else {
        multiply_integers<kSize>(w, i, shape, a.integers, b.integers, std::ldexp(1.0, unit));
      }
      return;
    }
  }
#endif
  const auto left = a.doubles<kSize>(), right = b.doubles<kSize>();
  if constexpr (kSize % kDoubles == 0) {
    if (rounds_only) {
      multiply_doubles<kSize>(w, i, shape, left, right);
      return;
    }
  }
  multiply_to_d<kSize, double>(w, i, shape, left, right, flushes);
}

// There are handlers for many combinations of types and sizes. To save compile time, the large
// functions are templates of only a matrix size and one type (the type of an operand or of the
// sums).
template <int kSize, int kDepth, int kBlocks, class A, class B>
void multiply(Wave& w, const Inst& i) {
  constexpr Shape kShape = {kDepth, kBlocks};
  if constexpr (std::is_same_v<SumOf<A>, double>) {
    static_assert(kDepth * kBlocks * kSize <= Widened::kElements);
    Widened unshared[2];
    Widened &a = load<kSize, A>(w, i, 0, kShape, unshared[0]),
            &b = load<kSize, B>(w, i, 1, kShape, unshared[1]);
    multiply_floats<kSize>(w, i, kShape, a, b, A::kBits == 16 && flushes_denormals(w));
  } else {
    static_assert(kDepth * kBlocks * kSize <= kMostElements);
    alignas(64) int32_t a[kMostElements / kSize][kSize], b[kMostElements / kSize][kSize];
    widen<kSize, A>(w, i, 0, kShape, a);
    widen<kSize, B>(w, i, 1, kShape, b);
    multiply_to_d<kSize, int32_t>(w, i, kShape, a, b, false);
  }
}

// MFMA of f64 differs from the other types: a lane holds one element of an operand, elements are
// assigned to lanes differently, and blgp negates operands.
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

// Adds an operation. words: the number of registers of A, and of B. results: the number of
// registers of C, and of D.
[[gnu::noinline]] void add_words(Ops& ops, const std::string& name, int words, int results,
                                 Handler run) {
  const std::string operand = type_of_width(words), result = type_of_width(results);
  ops.add(name, result + "=" + operand + "," + operand + "," + result, run, kMatrix);
}

template <int kSize, int kDepth, int kBlocks, class A, class B = A>
void add(Ops& ops, const std::string& name) {
  add_words(ops, name, kSize * kDepth * kBlocks / 64 * A::kBits / 32, kSize * kSize * kBlocks / 64,
            multiply<kSize, kDepth, kBlocks, A, B>);
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
  ops.add("v_mfma_f64_16x16x4_f64", "b256=f64,f64,b256", multiply_f64<16, 1>, kMatrix);
  ops.add("v_mfma_f64_4x4x4_4b_f64", "b64=f64,f64,b64", multiply_f64<4, 4>, kMatrix);
  // bf16 instructions that only gfx90a has, with half the depth of the others.
  add<32, 2, 2, InBF16>(ops, "v_mfma_f32_32x32x2bf16");
  add<16, 2, 4, InBF16>(ops, "v_mfma_f32_16x16x2bf16");
  add<4, 2, 16, InBF16>(ops, "v_mfma_f32_4x4x2bf16");
  add<32, 4, 1, InBF16>(ops, "v_mfma_f32_32x32x4bf16");
  add<16, 8, 1, InBF16>(ops, "v_mfma_f32_16x16x8bf16");
  add<32, 8, 1, InI8>(ops, "v_mfma_i32_32x32x8i8");
  add<16, 16, 1, InI8>(ops, "v_mfma_i32_16x16x16i8");
  register_mfma_scale(ops);
  register_mfma_sparse(ops);
}

}  // namespace ark_emu
