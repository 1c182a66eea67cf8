// A running softmax of scores that matrix units have computed. The numerator of a score in the
// softmax is 2 to (score - running maximum); names call it a power. Each warp has 16 rows of
// scores. A lane has scores of two rows, lane / 4 and lane / 4 + 8. In each of these rows it has
// two neighbouring scores of every eight columns of a tile.

constexpr float ARK_ATTENTION_LOG2E = 1.44269504f;

// 2^v, with an error of a few units in the last place.
ARK_DEVICE float ark_attention_power(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// Takes the place of a function that returns an operand of a task, if the task does not have this
// operand.
struct ArkAttentionNone {
  ARK_DEVICE_MEMBER ArkNoOperand operator()(const ArkTask&) const { return {}; }
};

// The statistics of the running softmax. A thread has the statistics of two rows, and each row is
// divided among four lanes.
struct ArkAttentionRows {
  float top[2];  // what powers are relative to: the largest score so far, or nearly, times log2(e)
  float weight[2];  // this lane's share of the sum of powers
};

// A row's running maximum is raised only when a score exceeds it by more than this (in powers of
// two). Sums of exponentials of up to 2^8 lose no precision, and sums are seldom rescaled.
constexpr float ARK_ATTENTION_SLACK = 8.0f;

// Returns the largest score of a row to all four lanes that have parts of the row. half: which of a
// lane's two rows.
template <int BN>
ARK_DEVICE float ark_attention_largest(const float (&s)[BN / 2], int half) {
  float m = -ark_inf();
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    m = fmaxf(m, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
  }
  m = fmaxf(m, ark_shfl_xor(m, 1));
  return fmaxf(m, ark_shfl_xor(m, 2));
}
// Converts the scores of a row to exponentials relative to the running maximum `top`. Scores are
// first multiplied by `factor` (log2(e) and the scale). m: the largest of the scores. Returns the
// factor by which earlier sums must be multiplied.
template <int BN>
ARK_DEVICE float ark_attention_raise(float (&s)[BN / 2], float& top, int half, float m,
                                     float factor) {
  m *= factor;
  m = m > top + ARK_ATTENTION_SLACK ? m : top;
  const float keep = ark_attention_power(top - m);
  top = m;
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
    for (int i = 4 * j + 2 * half; i < 4 * j + 2 * half + 2; ++i) {
      s[i] = ark_attention_power(fmaf(s[i], factor, -m));
    }
  }
  return keep;
}
template <int BN>
ARK_DEVICE void ark_attention_powers(float (&s)[BN / 2], ArkAttentionRows& rows, float factor,
                                     float (&keep)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = ark_attention_largest<BN>(s, half);
    keep[half] = ark_attention_raise<BN>(s, rows.top[half], half, m, factor);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) sum += s[4 * j + 2 * half], sum += s[4 * j + 2 * half + 1];
    rows.weight[half] = fmaf(rows.weight[half], keep[half], sum);
  }
}

// Sets the scores of keys that a row does not see to -inf. place: the position (token) of the first
// of the thread's two rows. key: the number of the first key of the scores.
template <class S, int BN>
ARK_DEVICE void ark_attention_mask(float (&s)[BN / 2], int place, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = ark_attention_first<S>(place + 8 * half) - key;
    const int end = ark_attention_end<S>(place + 8 * half) - key;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 8 * j + ark_lane() % 4 * 2 + i;
        if (at < first || at >= end) s[4 * j + 2 * half + i] = -ark_inf();
      }
    }
  }
}

// Multiplies scores by `by` and adds a mask. row: the first of the thread's two rows, counted in
// the tile. key: the number of the first key of the scores.
template <class S, int BN, class M>
ARK_DEVICE void ark_attention_under(float (&s)[BN / 2], const M& mask, const ArkAttentionTile& tile,
                                    int row, int key, float by) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) {
    const int at = key + 8 * (i / 4) + ark_lane() % 4 * 2 + i % 2;
    s[i] = ark_attention_masked<S>(mask, tile, row + 8 * (i / 2 % 2), at, s[i] * by);
  }
}

// The mask for a thread's scores. A mask that is added to scores can be loaded before the scores
// are computed.
template <int BN, class M, bool GIVEN = M::given>
struct ArkAttentionMasks {
  template <class S>
  ARK_DEVICE_MEMBER void load(const M&, const ArkAttentionTile&, int, int) {}
  template <class S>
  ARK_DEVICE_MEMBER void apply(float (&)[BN / 2], const M&, const ArkAttentionTile&, int, int,
                               float) const {}
};
template <int BN, class M>
struct ArkAttentionMasks<BN, M, true> {
  static constexpr bool ADDED = M::FORM == ARK_MASK_ADDED;
  float added[ADDED ? BN / 2 : 1] = {};
  // Loads the mask. Arguments as for ark_attention_under.
  template <class S>
  ARK_DEVICE_MEMBER void load(const M& mask, const ArkAttentionTile& tile, int row, int key) {
    if constexpr (ADDED) ark_attention_under<S, BN>(added, mask, tile, row, key, 1.0f);
  }
  // Multiplies scores by `by` and applies the mask.
  template <class S>
  ARK_DEVICE_MEMBER void apply(float (&s)[BN / 2], const M& mask, const ArkAttentionTile& tile,
                               int row, int key, float by) const {
    if constexpr (ADDED) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) s[i] = s[i] * by + added[i];
    } else {
      ark_attention_under<S, BN>(s, mask, tile, row, key, by);
    }
  }
};

template <typename T, int BN>
ARK_DEVICE void ark_attention_round(const float (&s)[BN / 2], ark_u32 (&p)[BN / 4]) {
  T* type = nullptr;
#pragma unroll
  for (int i = 0; i < BN / 4; ++i) p[i] = ark_pack_pair(type, s[2 * i], s[2 * i + 1]);
}
