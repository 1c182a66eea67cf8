// A tile of an fp32 matrix product on matrix units (mma.sync m16n8k8 of tf32). Asynchronous copies
// bring both operands to shared memory in their memory layout, several stages of k ahead. A warp
// computes WM by WN elements of the tile.
//
// TERMS 1: elements are rounded to tf32. TERMS 3: full fp32 precision. Each element is then split
// into a high and a low tf32 number. Of the four products of two elements, the product of the low
// parts is omitted (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
// while surpassing the FP32 theoretical peak performance", 2022).
//
// Matrix units truncate their sums. So each stage begins with zero, and the stages' sums are added
// up by ordinary instructions (section 3 there). A number too large for tf32, an infinity or a NaN
// makes a result wrong. Such results are computed again by ordinary instructions.

// One operand of a tile's product a b, with KT elements along k per stage. It has HIGH rows (the
// operand b: columns) in shared memory, of which `rows` exist in the matrix (all of them if WHOLE).
// Element (row, k) is at at[row * ROW_STRIDE + k * K_STRIDE]. ALONG: false if neighbouring rows are
// contiguous in memory, otherwise true. Rows in shared memory are padded, so that a warp's reads
// access different banks.
template <int HIGH, int DEPTH, ark_i64 ROW_STRIDE, ark_i64 K_STRIDE, bool ALONG, bool WHOLE, int KT>
struct ArkUnitSide {
  static constexpr int depth = DEPTH, PITCH = ALONG ? KT + 8 : HIGH + 4;
  static constexpr int FLOATS = (ALONG ? HIGH : KT) * PITCH;
  static constexpr bool along = ALONG;
  const float* at;
  int rows;

  // Starts the copies of the stage whose first element along k is k0.
  ARK_DEVICE_MEMBER void copy(ark_u32 to, int k0) const {
    constexpr int LINE_VECTORS = (ALONG ? KT : HIGH) / 4;
    constexpr int LINES = ALONG ? HIGH : KT;
    constexpr int ROUND = ARK_THREADS / LINE_VECTORS;
    constexpr ark_i64 ACROSS = ALONG ? ROW_STRIDE : K_STRIDE, STEP = ALONG ? K_STRIDE : ROW_STRIDE;
    const bool wide = STEP == 1 && ACROSS % 4 == 0 && ark_aligned(reinterpret_cast<ark_u64>(at));
    const int first = ark_tid() % LINE_VECTORS * 4;
    const float* from = at + k0 * K_STRIDE + first * STEP;
#pragma unroll
    for (int i = 0; i < LINES; i += ROUND) {
      const int line = ark_tid() / LINE_VECTORS + i;
      if (LINES % ROUND != 0 && line >= LINES) break;
      const int row = ALONG ? line : first, k = k0 + (ALONG ? first : line);
      const int high = WHOLE ? HIGH : rows;
      const int along = ALONG ? DEPTH - k : high - row;
      const bool here = ALONG ? WHOLE || row < high : DEPTH % KT == 0 || k < DEPTH;
      constexpr bool EVEN = ALONG ? DEPTH % KT == 0 : WHOLE;
      const int left = !here ? 0 : EVEN || along >= 4 ? 4 : along < 0 ? 0 : along;
      const ark_u32 place = to + 4u * (line * PITCH + first);
      const float* here_from = from + line * ACROSS;
      if (wide) {
        ark_copy_words(place, here_from, 4 * left);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) ark_copy_word(place + 4u * j, here_from + j * STEP, j < left);
      }
    }
  }

  // Returns elements k and k + 1 of a row of a stage in shared memory.
  ARK_DEVICE float2 pair(const float* stage, int row, int k) {
    if constexpr (ALONG) return *reinterpret_cast<const float2*>(stage + row * PITCH + k);
    return {stage[k * PITCH + row], stage[(k + 1) * PITCH + row]};
  }
};

// Prepares a number for the matrix unit's truncation to tf32 (10 bits of mantissa), so that the
// truncation nearly rounds. At most two thirds of a unit of the tenth bit are added, half a unit on
// average. Numbers that tf32 represents do not change. This takes one multiplication, which keeps
// infinities and NaN. The conversion instruction that rounds has an eighth of the multiplication's
// throughput.
ARK_DEVICE float ark_tf32_before(float v) { return v * (1.0f + 0x1.555556p-12f); }
ARK_DEVICE void ark_unit_product(float (&sum)[4], const ark_u32 (&a)[4], const ark_u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Splits a number into the bits of its high tf32 part and, with three terms, of its low part (the
// number minus the high part). Matrix units truncate both parts.
template <int TERMS>
ARK_DEVICE void ark_unit_parts(float v, ark_u32& high, ark_u32& low) {
  high = __float_as_uint(ark_tf32_before(v));
  if constexpr (TERMS > 1) {
    high &= 0xffffe000u;
    low = __float_as_uint(v - __uint_as_float(high));
  }
}

// Computes one element of the product again, by ordinary instructions. The loop ends early when the
// sum is NaN, which it then stays.
static __device__ __noinline__ float ark_unit_again(const float* a, ark_i64 a_step, const float* b,
                                                    ark_i64 b_step, int depth) {
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < depth && sum == sum; ++k, a += a_step, b += b_step) sum = fmaf(*a, *b, sum);
  return sum;
}

// Computes a tile of ROWS by COLUMNS sums on matrix units. Both operands are copied to shared
// memory, KT elements along k at a time, to a ring of STAGES stages. finish(row, column, v)
// receives four neighbouring sums. again(row, column) computes an element's sum by ordinary
// instructions.
template <int ROWS, int COLUMNS, int WM, int WN, int TERMS, int KT, int STAGES, class A, class B,
          class Again, class Finish>
ARK_DEVICE void ark_unit_tile(char* scratch, const A& a, const B& b, const Again& again,
                              const Finish& finish) {
  constexpr int ACROSS = COLUMNS / WN, MT = WM / 16, NT = WN / 8;
  constexpr int STEPS = (A::depth + KT - 1) / KT, STAGE = A::FLOATS + B::FLOATS;
  static_assert(ROWS / WM * ACROSS * 32 == ARK_THREADS, "a warp has its part of a tile");
  const int group = ark_lane() / 4, place = ark_lane() % 4;
  const int row = ark_warp() / ACROSS * WM, column = ark_warp() % ACROSS * WN;
  const float* stages = reinterpret_cast<const float*>(scratch);
  const ark_u32 shared = static_cast<ark_u32>(__cvta_generic_to_shared(scratch));
  const auto fetch = [&](int step) {
    const ark_u32 to = shared + 4u * STAGE * (step % STAGES);
    if (step < STEPS) {
      a.copy(to, step * KT);
      b.copy(to + 4u * A::FLOATS, step * KT);
    }
    ark_copies_begun();
  };
  float sums[MT][NT][4] = {};
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < STEPS; ++step) {
    ark_copies_but<STAGES - 2>();
    ark_sync();
    fetch(step + STAGES - 1);
    const float* left = stages + step % STAGES * STAGE;
    const float* right = left + A::FLOATS;
    float begun[MT][NT][4] = {};
    auto& to = [&]() -> auto& {
      if constexpr (TERMS > 1)
        return begun;
      else
        return sums;
    }();
#pragma unroll 4
    for (int k = 0; k < KT; k += 8) {
      ark_u32 x[MT][4], low_x[MT][4], y[NT][2], low_y[NT][2];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 v = A::pair(left, row + 16 * i + 8 * half + group, k + 2 * place);
          ark_unit_parts<TERMS>(v.x, x[i][half], low_x[i][half]);
          ark_unit_parts<TERMS>(v.y, x[i][2 + half], low_x[i][2 + half]);
        }
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float2 v = B::pair(right, column + 8 * j + group, k + 2 * place);
        ark_unit_parts<TERMS>(v.x, y[j][0], low_y[j][0]);
        ark_unit_parts<TERMS>(v.y, y[j][1], low_y[j][1]);
      }
#pragma unroll
      for (int term = 3 - TERMS; term < 3; ++term) {
#pragma unroll
        for (int i = 0; i < MT; ++i) {
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            ark_unit_product(to[i][j], term == 0 ? low_x[i] : x[i], term == 1 ? low_y[j] : y[j]);
          }
        }
      }
    }
    if constexpr (TERMS > 1) {
#pragma unroll
      for (int e = 0; e < MT * NT * 4; ++e) {
        sums[e / 4 / NT][e / 4 % NT][e % 4] += begun[e / 4 / NT][e / 4 % NT][e % 4];
      }
    }
  }
  ark_copies_but<0>();
  // A lane has two neighbouring sums in each of two rows. The lanes of a warp exchange their sums
  // through shared memory, so that the warp stores whole rows of its part. Each store instruction
  // then writes to few cache lines.
  ark_sync();
  constexpr int PITCH = WN + 8, PACKS = WN / 4;
  float* part = reinterpret_cast<float*>(scratch) + ark_warp() * (WM * PITCH);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      float* to = part + (16 * i + group) * PITCH + 8 * j + 2 * place;
      *reinterpret_cast<float2*>(to) = {sums[i][j][0], sums[i][j][1]};
      *reinterpret_cast<float2*>(to + 8 * PITCH) = {sums[i][j][2], sums[i][j][3]};
    }
  }
  __syncwarp();
#pragma unroll 2
  for (int e = ark_lane(); e < WM * PACKS; e += 32) {
    const float4 held = *reinterpret_cast<const float4*>(part + e / PACKS * PITCH + e % PACKS * 4);
    float v[4] = {held.x, held.y, held.z, held.w};
    const int at_row = row + e / PACKS, at_column = column + e % PACKS * 4;
    if constexpr (TERMS > 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool there = at_row < a.rows && at_column + j < b.rows;
        if (there && !(fabsf(v[j]) <= 3.402823466e38f)) v[j] = again(at_row, at_column + j);
      }
    }
    finish(at_row, at_column, v);
  }
}
