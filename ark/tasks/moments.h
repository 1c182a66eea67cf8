// Folds of reductions whose totals have several numbers: the moments of columns or rows, and two
// sums. Included after folds.h, by reduce.h's kinds only.

// Running moments of a set of elements: their number, their mean, and the sum of their squared
// differences from the mean. PART: the number of elements of a complete part of a row or column.
// For a complete part only the mean and the sum of squares are stored, in a 64-bit word.
template <int PART>
struct ArkMoments {
  float count, mean, squares;
};
template <typename T>
inline constexpr bool ark_is_moments = false;
template <int PART>
inline constexpr bool ark_is_moments<ArkMoments<PART>> = true;
template <int PART>
ARK_DEVICE ark_i64 ark_moments_word(const ArkMoments<PART>& v) {
  const ark_u64 high = ark_float_bits(v.mean);
  return static_cast<ark_i64>(high << 32 | ark_float_bits(v.squares));
}
template <int PART>
struct ArkTotal<ArkMoments<PART>> {
  ARK_DEVICE ArkMoments<PART> of(float v) { return {1.0f, v, 0.0f}; }
  ARK_DEVICE ArkMoments<PART> of(ark_i64 word) {
    const ark_u64 bits = static_cast<ark_u64>(word);
    return {static_cast<float>(PART), ark_bits_float(static_cast<ark_u32>(bits >> 32)),
            ark_bits_float(static_cast<ark_u32>(bits))};
  }
};
// Joins the moments of two sets by the formula of Chan, Golub and LeVeque, "Updating formulae and a
// pairwise algorithm for computing sample variances", 1979.
struct ArkMomentsFold {
  template <int PART>
  ARK_DEVICE ArkMoments<PART> none(ArkMoments<PART>) {
    return {0.0f, 0.0f, 0.0f};
  }
  template <int PART>
  ARK_DEVICE ArkMoments<PART> join(const ArkMoments<PART>& a, const ArkMoments<PART>& b) {
    const float count = a.count + b.count, apart = b.mean - a.mean;
    const float share = count > 0.0f ? b.count * ark_reciprocal(count) : 0.0f;
    return {count, a.mean + apart * share,
            a.squares + b.squares + apart * apart * (a.count * share)};
  }
};

// Two sums over the same elements, which are stored in a 64-bit word.
struct ArkSums {
  float first, second;
};
ARK_DEVICE ark_i64 ark_sums_word(const ArkSums& v) {
  const ark_u64 high = ark_float_bits(v.first);
  return static_cast<ark_i64>(high << 32 | ark_float_bits(v.second));
}
template <>
struct ArkTotal<ArkSums> {
  ARK_DEVICE ArkSums of(const ArkSums& v) { return v; }
  ARK_DEVICE ArkSums of(ark_i64 word) {
    const ark_u64 bits = static_cast<ark_u64>(word);
    return {ark_bits_float(static_cast<ark_u32>(bits >> 32)),
            ark_bits_float(static_cast<ark_u32>(bits))};
  }
};
struct ArkSumsFold {
  ARK_DEVICE ArkSums none(ArkSums) { return {0.0f, 0.0f}; }
  ARK_DEVICE ArkSums join(const ArkSums& a, const ArkSums& b) {
    return {a.first + b.first, a.second + b.second};
  }
};

template <int PART>
ARK_DEVICE ArkMoments<PART> ark_shfl_bits(const ArkMoments<PART>& v, int mask) {
  return {ark_shfl_xor(v.count, mask), ark_shfl_xor(v.mean, mask), ark_shfl_xor(v.squares, mask)};
}

ARK_DEVICE ArkSums ark_shfl_bits(const ArkSums& v, int mask) {
  return {ark_shfl_bits(v.first, mask), ark_shfl_bits(v.second, mask)};
}

// The moments of several elements are joined at once, with two divisions for all of them.
template <class F, int PART, int U, int V, class There>
ARK_DEVICE void ark_join_packs(ArkMoments<PART> (&part)[V], const ArkMoments<PART> (&value)[U][V],
                               const There& there) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    float count = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!there(u)) continue;
      count += value[u][j].count;
      sum += value[u][j].count * value[u][j].mean;
    }
    const float mean = count > 0.0f ? sum * ark_reciprocal(count) : 0.0f;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!there(u)) continue;
      const float apart = value[u][j].mean - mean;
      squares += value[u][j].squares + value[u][j].count * apart * apart;
    }
    part[j] = F::join(part[j], ArkMoments<PART>{count, mean, squares});
  }
}
