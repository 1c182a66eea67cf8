// Handlers of SMFMAC of gfx942 and gfx950: D += A * B where two of every four elements of A along K
// are zero and not stored. CDNA3 and CDNA4 instruction set documents, section "Sparse matrices":
// Operand B: each group of lanes holds runs of 16 bytes along K. Operand A holds the two stored
// elements of every four, in the same order along K. Source 2 has the indices of these elements,
// two bits per element.
#include "mfma.h"

namespace ark_emu {
namespace {

template <int kSize, int kDepth, class A, class B>
void multiply_sparse(Wave& w, const Inst& i) {
  using T = SumOf<A>;
  constexpr int kDense = kSize * kDepth / 64, kStored = kDense / 2;   // elements in a lane
  // The number of elements in 16 bytes, and the number of groups of lanes.
  constexpr int kRun = 128 / B::kBits, kGroups = 64 / kSize;
  const auto position = [](int group, int e) {
    return kRun * group + e % kRun + e / kRun * (kRun * kGroups);
  };
  T dense[kDepth][kSize];
  T stored[kSize][kDepth / 2];
  int where[kSize][kDepth / 2];   // a stored element's place in K
  // A lane's register of indices has several sets of them; abid selects the set.
  constexpr int kIndexBits = 2 * kStored, kSets = 32 / kIndexBits;
  const int set = (i.cbsz & 3) == 0 ? i.abid % kSets : 0;
  for (int lane = 0; lane < 64; lane++) {
    const int line = lane % kSize, group = lane / kSize;
    for (int e = 0; e < kDense; e++) {
      dense[position(group, e)][line] = element<B>(w, i.src[1], e, lane);
    }
    const uint64_t indices = word_of(w, i.src[2], 0, lane) >> (set * kIndexBits);
    for (int e = 0; e < kStored; e++) {
      const int at = group * kStored + e;
      const int chosen = static_cast<int>((indices >> (2 * e)) & 3);
      stored[line][at] = element<A>(w, i.src[0], e, lane);
      where[line][at] = position(group, e / 2 * 4 + chosen);
    }
  }
  T sums[1][kSize][kSize] = {};
  for (int row = 0; row < kSize; row++) {
    for (int e = 0; e < kDepth / 2; e++) {
      const T* right = dense[where[row][e]];
      for (int column = 0; column < kSize; column++) {
        sums[0][row][column] += stored[row][e] * right[column];
      }
    }
  }
  write_d(w, i, i.dst[0], sums, 1);
}

// Adds an operation. words: the number of registers of B; A has half as many. results: the number
// of registers of D.
[[gnu::noinline]] void add_words(Ops& ops, const std::string& name, int words, int results,
                                 Handler run) {
  const std::string sources = type_of_width(words / 2) + "," + type_of_width(words) + ",b32";
  ops.add("v_smfmac_" + name, type_of_width(results) + "=" + sources, run, kMatrix);
}

template <int kSize, int kDepth, class A, class B = A>
void add(Ops& ops, const std::string& name) {
  add_words(ops, name, kSize * kDepth / 64 * B::kBits / 32, kSize * kSize / 64,
            multiply_sparse<kSize, kDepth, A, B>);
}

template <int kSize, int kDepth>
void add_fp8(Ops& ops, const std::string& name) {
  add<kSize, kDepth, InFp8>(ops, name + "fp8_fp8");
  add<kSize, kDepth, InFp8, InBf8>(ops, name + "fp8_bf8");
  add<kSize, kDepth, InBf8, InFp8>(ops, name + "bf8_fp8");
  add<kSize, kDepth, InBf8>(ops, name + "bf8_bf8");
}

}  // namespace

void register_mfma_sparse(Ops& ops) {
  add<16, 32, InF16>(ops, "f32_16x16x32_f16");
  add<32, 16, InF16>(ops, "f32_32x32x16_f16");
  add<16, 32, InBF16>(ops, "f32_16x16x32_bf16");
  add<32, 16, InBF16>(ops, "f32_32x32x16_bf16");
  add<16, 64, InI8>(ops, "i32_16x16x64_i8");
  add<32, 32, InI8>(ops, "i32_32x32x32_i8");
  add_fp8<16, 64>(ops, "f32_16x16x64_");
  add_fp8<32, 32>(ops, "f32_32x32x32_");
  // gfx950 has instructions with twice the depth (K).
  add<16, 64, InF16>(ops, "f32_16x16x64_f16");
  add<32, 32, InF16>(ops, "f32_32x32x32_f16");
  add<16, 64, InBF16>(ops, "f32_16x16x64_bf16");
  add<32, 32, InBF16>(ops, "f32_32x32x32_bf16");
  add<16, 128, InI8>(ops, "i32_16x16x128_i8");
  add<32, 64, InI8>(ops, "i32_32x32x64_i8");
  add_fp8<16, 128>(ops, "f32_16x16x128_");
  add_fp8<32, 64>(ops, "f32_32x32x64_");
}

}  // namespace ark_emu
