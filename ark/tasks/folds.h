// Combines values (sum, product, maximum, minimum) over the threads of a block. The order in which
// values are combined is a tree that depends only on the shapes, so results have the same bits in
// every run.

struct ArkAddFold {
  template <typename T>
  ARK_DEVICE T none(T) {
    return 0;
  }
  ARK_DEVICE float join(float a, float b) { return a + b; }
  ARK_DEVICE ark_i32 join(ark_i32 a, ark_i32 b) {
    return static_cast<ark_i32>(static_cast<ark_u32>(a) + static_cast<ark_u32>(b));
  }
  ARK_DEVICE ark_i64 join(ark_i64 a, ark_i64 b) {
    return static_cast<ark_i64>(static_cast<ark_u64>(a) + static_cast<ark_u64>(b));
  }
};
struct ArkMulFold {
  template <typename T>
  ARK_DEVICE T none(T) {
    return 1;
  }
  ARK_DEVICE float join(float a, float b) { return a * b; }
  ARK_DEVICE ark_i32 join(ark_i32 a, ark_i32 b) {
    return static_cast<ark_i32>(static_cast<ark_u32>(a) * static_cast<ark_u32>(b));
  }
  ARK_DEVICE ark_i64 join(ark_i64 a, ark_i64 b) {
    return static_cast<ark_i64>(static_cast<ark_u64>(a) * static_cast<ark_u64>(b));
  }
};
// If an element is NaN, the result is NaN, as in NumPy. (NaN differs from itself.)
struct ArkMaxFold {
  ARK_DEVICE float none(float) { return -ark_inf(); }
  ARK_DEVICE ark_i32 none(ark_i32) { return -2147483647 - 1; }
  ARK_DEVICE ark_i64 none(ark_i64) { return -9223372036854775807ll - 1; }
  template <typename T>
  ARK_DEVICE T join(T a, T b) {
    return ark_chosen(b > a || b != b ? b : a);
  }
};
struct ArkMinFold {
  ARK_DEVICE float none(float) { return ark_inf(); }
  ARK_DEVICE ark_i32 none(ark_i32) { return 2147483647; }
  ARK_DEVICE ark_i64 none(ark_i64) { return 9223372036854775807ll; }
  template <typename T>
  ARK_DEVICE T join(T a, T b) {
    return ark_chosen(b < a || b != b ? b : a);
  }
};

// Converts one element to the type T in which sums (or products, maxima, minima) are accumulated.
template <typename T>
struct ArkTotal {
  template <typename V>
  ARK_DEVICE T of(V v) {
    return T(v);
  }
};

// The running sum of exponentials of a set of elements: the largest element, and the sum of
// e^(element - largest).
struct ArkExpSum {
  float most, sum;
};
template <typename T>
inline constexpr bool ark_is_exp_sum = false;
template <>
inline constexpr bool ark_is_exp_sum<ArkExpSum> = true;
template <>
struct ArkTotal<ArkExpSum> {
  ARK_DEVICE ArkExpSum of(float v) { return {v, 1.0f}; }
};
// If an element is NaN, so is the sum: a comparison with NaN is false, and the exponential is NaN.
// Single values are selected instead of structs, for which compilers would emit branches.
struct ArkExpSumFold {
  ARK_DEVICE ArkExpSum none(ArkExpSum) { return {-ark_inf(), 0.0f}; }
  ARK_DEVICE ArkExpSum join(const ArkExpSum& a, const ArkExpSum& b) {
    const bool more = b.most > a.most;
    const float most = more ? b.most : a.most, least = more ? a.most : b.most;
    const float share = least == most ? 1.0f : ark_exp(least - most);
    const float kept = more ? b.sum : a.sum, scaled = more ? a.sum : b.sum;
    return {most, scaled * share + kept};
  }
};
// Adds U packs of V values to V separate totals. there(u): false if pack u does not exist.
template <class F, typename T, int U, int V, class There>
ARK_DEVICE void ark_join_packs(T (&part)[V], const T (&value)[U][V], const There& there) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (!there(u)) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = F::join(part[j], value[u][j]);
  }
}
// Exponentials of several elements are added after their largest one is known, so that a sum is
// scaled once for all of them. A total of -inf alone is not subtracted, because that would be NaN.
// An element that does not exist counts as -inf, so that no exponential is in a branch. The
// relative error of an exponential of v <= 0 is at most 1e-7 (1 - v).
template <class F, int U, int V, class There>
ARK_DEVICE void ark_join_packs(ArkExpSum (&part)[V], const ArkExpSum (&value)[U][V],
                               const There& there) {
  const auto power = [](float v) { return ark_power_of_two(1.44269504f * v); };
#pragma unroll
  for (int j = 0; j < V; ++j) {
    float most = part[j].most, given[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      given[u] = there(u) ? value[u][j].most : -ark_inf();
      most = given[u] > most ? given[u] : most;
    }
    const float from = most == -ark_inf() ? 0.0f : most;
    float sum = part[j].sum * power(part[j].most - from);
#pragma unroll
    for (int u = 0; u < U; ++u) sum += power(given[u] - from);
    part[j] = {most, sum};
  }
}
// The logarithm of the sum of exponentials. NaN if an element is infinite, as the log-softmax of
// such a row.
ARK_DEVICE float ark_exp_sum_log(const ArkExpSum& v) {
  return v.most == ark_inf() ? v.most - v.most : v.most + ark_log(v.sum);
}

ARK_DEVICE ark_i32 ark_shfl_bits(ark_i32 v, int mask) {
  return static_cast<ark_i32>(ark_shfl_xor(static_cast<ark_u32>(v), mask));
}
ARK_DEVICE float ark_shfl_bits(float v, int mask) { return ark_shfl_xor(v, mask); }
ARK_DEVICE ark_i64 ark_shfl_bits(ark_i64 v, int mask) {
  const ark_u64 bits = static_cast<ark_u64>(v);
  const ark_u64 high = ark_shfl_xor(static_cast<ark_u32>(bits >> 32), mask);
  return static_cast<ark_i64>(high << 32 | ark_shfl_xor(static_cast<ark_u32>(bits), mask));
}
ARK_DEVICE ArkExpSum ark_shfl_bits(const ArkExpSum& v, int mask) {
  return {ark_shfl_xor(v.most, mask), ark_shfl_xor(v.sum, mask)};
}

// The sum (or product, maximum, minimum) over all lanes of a warp, returned in every lane. With
// PART, one result for each group of PART lanes.
template <class F, int PART = ARK_LANES, typename T>
ARK_DEVICE T ark_warp_fold(T v) {
#pragma unroll
  for (int mask = PART / 2; mask > 0; mask >>= 1) v = F::join(v, ark_shfl_bits(v, mask));
  return v;
}

// Combines R values of each thread over a team of TEAM warps, and returns the R totals in each
// thread of the team. red: shared memory for 2 R values of each warp of the block. Successive calls
// use its two halves alternately, so one barrier per call suffices. A team that is neither a single
// warp nor the whole block requires a backend that defines ARK_HAS_TEAMS. PART: for teams of one
// warp, the number of lanes that share a total.
#if !defined(ARK_HAS_TEAMS)
template <int TEAM>
ARK_DEVICE void ark_team_sync() {
  ark_sync();
}
#endif
template <class F, int TEAM, int PART = ARK_LANES, int R, typename T>
ARK_DEVICE void ark_fold(T (&v)[R], T* red, int& parity) {
#pragma unroll
  for (int r = 0; r < R; ++r) v[r] = ark_warp_fold<F, PART>(v[r]);
  if (TEAM == 1) return;
  const int team = TEAM == ARK_WARPS ? 0 : ark_warp() / TEAM;
  T* mine = red + (parity * ARK_WARPS + team * TEAM) * R;
  parity ^= 1;
  if (ark_lane() == 0) {
#pragma unroll
    for (int r = 0; r < R; ++r) mine[r * TEAM + ark_warp() - team * TEAM] = v[r];
  }
  ark_team_sync<TEAM>();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    T total = mine[r * TEAM];
#pragma unroll
    for (int w = 1; w < TEAM; ++w) total = F::join(total, mine[r * TEAM + w]);
    v[r] = total;
  }
}
