// Multiplies rows of a quantised matrix, in a stage of shared memory, by an input row on matrix
// units (linear_rows.h). Codes are converted to fp16 when they are read. The input is fp16, too.
// Each block of its elements is scaled by a power of two, so it has three bits more precision than
// bf16 and the same range.

constexpr int ARK_INPUT_BLOCK = 128;  // INPUT_BLOCK of linear_form.py: elements that share a factor

// Hides a thread's number from the compiler. Otherwise the compiler would compute element positions
// once, because they are the same for each task of the same layer, and would keep the positions of
// all layers in local memory.
ARK_DEVICE int ark_unknown(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// How R rows of K codes fill the 16 rows of the matrix unit's tile. Each row is cut into SEGMENTS
// parts, and each part is a row of the tile. The tile's columns are the same parts of x, as in
// linear_units.h. A lane loads BYTES bytes of a row at once, and four lanes load COLUMNS codes.
// UNIT: the number of codes that have one scale and whose elements of x have one factor; their
// products are summed before they are scaled. NONE: true if matrix units do not support these rows.
template <class ROW, int R, typename T>
struct ArkRowTile;
template <class C, int K, int GROUP, class S, bool ZEROS, int R, typename T>
struct ArkRowTile<ArkRow<C, K, GROUP, S, ZEROS>, R, T> {
  static constexpr int SEGMENTS = R == 1 ? 8 : 16 / R, PART = K / SEGMENTS;
  static constexpr int OF_BYTE = 8 / ARK_CODE_BITS<C>;
  static constexpr bool EVEN = K % SEGMENTS == 0 && (GROUP % PART == 0 || PART % GROUP == 0);
  // The number of codes that divides both a group (the codes of one scale) and a part of a row: the
  // smaller of the two, or 1 if the row cannot be cut evenly.
  static constexpr int ALL = !EVEN ? 1 : GROUP < PART ? GROUP : PART;
  static constexpr int UNIT = ALL % 128 == 0 ? 128 : ALL % 64 == 0 ? 64 : ALL % 32 == 0 ? 32 : 1;
  static constexpr int MOST = UNIT / (4 * OF_BYTE), BYTES = MOST < 16 ? MOST : 16;
  static constexpr bool NONE = BYTES < 4 || ZEROS || sizeof(T) != 2 || R > 16;
  static constexpr int OWN = BYTES * OF_BYTE, COLUMNS = 4 * OWN;  // OWN: codes of a lane
  static constexpr int EIGHTS = NONE ? 1 : OWN / 8;
  static constexpr int PITCH = PART + (SEGMENTS > 1 ? 32 : 0);  // neighbours begin at other banks
  // SIZE: the number of elements of x in shared memory. place(k): the position of element k.
  // Elements that a lane uses at once are neighbours.
  static constexpr int SIZE = NONE ? K : SEGMENTS * PITCH;
  ARK_DEVICE int place(int k) {
    if constexpr (NONE) {
      return k;
    } else {
      const int in = k % PART, lane = in % COLUMNS / OWN, eight = in % OWN / 8;
      return k / PART * PITCH + in / COLUMNS * COLUMNS + eight * 32 + lane * 8 + k % 8;
    }
  }
};

// Chooses the factor, a power of two, by which a block of the input is multiplied. With it the
// block's largest magnitude, `most`, is in [2^14, 2^15). back: set to the inverse factor, by which
// the block's products are multiplied.
ARK_DEVICE float ark_block_factor(float most, float& back) {
  const ark_u32 exponent = ark_float_bits(most) >> 23 & 255u;
  const ark_u32 known = exponent < 15u ? 15u : exponent;
  back = ark_bits_float((known - 14u) << 23);
  return ark_bits_float((268u - known) << 23);
}

// Writes the four elements that this lane has of an input block to their positions in xs, and the
// block's inverse factor to `blocks`. The elements are those of columns `first`, `first` + 1,
// `second` and `second` + 1. Without matrix units (Tile::NONE) the elements are not scaled.
// Elements from K on are 0.
template <class Tile, int K, typename T>
ARK_DEVICE void ark_store_block(T* xs, float* blocks, int first, int second, const float (&v)[4]) {
  float by = 1.0f;
  if constexpr (!Tile::NONE) {
    float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, ark_shfl_xor(most, mask));
    float back;
    by = ark_block_factor(most, back);
    if (ark_lane() == 0) blocks[first / ARK_INPUT_BLOCK] = back;
  }
  if (first < K) ark_narrow(xs + Tile::place(first), v[0] * by, v[1] * by);
  if (second < K) ark_narrow(xs + Tile::place(second), v[2] * by, v[3] * by);
}

// Loads BYTES of shared memory as words.
template <int BYTES>
ARK_DEVICE void ark_load_words(ark_u32 (&to)[BYTES / 4], const unsigned char* p) {
  if constexpr (BYTES == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *reinterpret_cast<const ark_u32*>(p);
  }
}

// Converts pair j of a lane's codes to two fp16 values in one word.
template <class C, int N>
ARK_DEVICE ark_u32 ark_code_operand(const ark_u32 (&words)[N], int j) {
  constexpr int PAIRS = 16 / ARK_CODE_BITS<C>;  // of a word
  return ark_code_pair(static_cast<const C*>(nullptr), words[j / PAIRS], j % PAIRS);
}

// The products of R rows of codes with the input x. x is in the tile's layout; `blocks` has the
// inverse factors of its blocks. Lane l gets the product of row l R / 32. apart: bytes from a row
// to the next, for two rows.
template <int R, class TILE, class C, int K, int GROUP, class S, bool ZEROS>
ARK_DEVICE float ark_tile_products(const ArkRow<C, K, GROUP, S, ZEROS>* rows, const ark_f16* x,
                                   const float* blocks,
                                   int apart = sizeof(ArkRow<C, K, GROUP, S, ZEROS>)) {
  typedef ArkRow<C, K, GROUP, S, ZEROS> Row;
  constexpr int SEGMENTS = TILE::SEGMENTS, PART = TILE::PART, COLUMNS = TILE::COLUMNS;
  constexpr int UNIT = TILE::UNIT, UNITS = PART / UNIT, STEPS = UNIT / COLUMNS;
  constexpr bool ONE = Row::GROUPS == 1;  // the row's scale is applied at the end
  const int me = ark_unknown(ark_lane()), row = me / 4, segment = row % SEGMENTS;
  const Row& lower = rows[row / SEGMENTS * (R > 1 ? 2 : 1)];
  const Row& upper =
      *reinterpret_cast<const Row*>(reinterpret_cast<const char*>(&lower) + (R > 1 ? apart : 0));
  // If all segments (parts of a row) begin at the same bank of shared memory, every second segment
  // processes its units in reverse order, to avoid bank conflicts.
  constexpr bool TURNED = SEGMENTS > 1 && PART / TILE::OF_BYTE % 128 == 0 && UNITS % 2 == 0 &&
                          UNIT / TILE::OF_BYTE == 64;
  // If a unit covers all banks of shared memory, every second segment (part of a row) processes the
  // halves of each unit in reverse order, to avoid bank conflicts.
  constexpr bool HALVES =
      SEGMENTS > 1 && PART / TILE::OF_BYTE % 128 == 0 && UNIT / TILE::OF_BYTE == 128 && STEPS == 2;
  const int turned = segment % 2, begin = segment * PART, lane = me % 4;
  const ark_f16* own = x + segment * TILE::PITCH + lane * 8;
  const unsigned char* low_bytes = lower.bytes + begin / TILE::OF_BYTE + lane * TILE::BYTES;
  const unsigned char* high_bytes = upper.bytes + begin / TILE::OF_BYTE + lane * TILE::BYTES;
  const auto start = [&](int u, int s) {
    return (TURNED ? u ^ turned : u) * UNIT + (HALVES ? s ^ turned : s) * COLUMNS;
  };
  float all[4] = {};
#pragma unroll(UNITS % 2 == 0 && STEPS == 1 ? 2 : 1)
  for (int u = 0; u < UNITS; ++u) {
    ark_u32 low[STEPS][TILE::BYTES / 4], high[STEPS][TILE::BYTES / 4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int byte = start(u, s) / TILE::OF_BYTE;
      ark_load_words<TILE::BYTES>(low[s], low_bytes + byte);
      if constexpr (R > 1) ark_load_words<TILE::BYTES>(high[s], high_bytes + byte);
    }
    const int column = begin + (TURNED ? u ^ turned : u) * UNIT;
    float first = blocks[column / ARK_INPUT_BLOCK], second = first;
    if constexpr (!ONE) {
      first *= ark_row_scale(lower, column / GROUP);
      second *= R > 1 ? ark_row_scale(upper, column / GROUP) : 0.0f;
    }
    float d[2][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = start(u, s);
#pragma unroll
      for (int i = 0; i < TILE::EIGHTS; ++i) {
        const uint4 b = *reinterpret_cast<const uint4*>(own + at + 32 * i);
        ark_u32 l[4], h[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          l[j] = ark_code_operand<C>(low[s], 4 * i + j);
          if constexpr (R > 1) h[j] = ark_code_operand<C>(high[s], 4 * i + j);
        }
        ark_mma(d[0], l[0], h[0], l[1], h[1], b.x, b.y, x);
        ark_mma(d[1], l[2], h[2], l[3], h[3], b.z, b.w, x);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      all[e] = fmaf(d[0][e] + d[1][e], first, all[e]);
      all[2 + e] = fmaf(d[0][2 + e] + d[1][2 + e], second, all[2 + e]);
    }
  }
  // The tile has products of each part of a row of weights with each part of x. Only products of
  // equal parts are used.
  const bool mine = lane == segment / 2, odd = segment % 2 != 0;
  float sums[2] = {mine ? (odd ? all[1] : all[0]) : 0.0f, mine ? (odd ? all[3] : all[2]) : 0.0f};
  if constexpr (ONE) {
    sums[0] *= ark_row_scale(lower, 0);
    if constexpr (R > 1) sums[1] *= ark_row_scale(upper, 0);
  }
#pragma unroll
  for (int mask = 1; mask < 4 * SEGMENTS; mask *= 2) {
    sums[0] += ark_shfl_xor(sums[0], mask);
    if constexpr (R > 1) sums[1] += ark_shfl_xor(sums[1], mask);
  }
  return R > 1 && (ark_lane() / (2 * SEGMENTS) & 1) != 0 ? sums[1] : sums[0];
}
