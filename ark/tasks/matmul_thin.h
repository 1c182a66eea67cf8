// Products of a matrix `many` with a matrix `few` that has only FEW rows (or columns), such as
// matrix times vector. `many` has MANY rows (or columns). Memory bandwidth limits such products, so
// each element of `many` is read once, in packs (vectors) of V elements. many(i, k) and few(j, k)
// are addresses of elements; finish(i, j, sum) stores a result. A task computes TILE of the MANY
// rows, from `first` on. Sums are over k0 to k1, in the same order in every run.

// Adds up partial sums over the warps of each team. There are TEAMS teams of TEAM warps. `parts`
// has EACH sums of each warp, warp after warp. Calls total(e, sum) for each total. e numbers the
// totals: the EACH totals of the first team, then those of the next team.
template <int TEAMS, int TEAM, int EACH, typename Sum, class Total>
ARK_DEVICE void ark_matmul_thin_totals(const Sum* parts, const Total& total) {
  for (int e = ark_tid(); e < TEAMS * EACH; e += ARK_THREADS) {
    const Sum* part = parts + e / EACH * TEAM * EACH + e % EACH;
    Sum sum = part[0];
    for (int w = 1; w < TEAM; ++w) sum += part[w * EACH];
    total(e, sum);
  }
}

// Adds sums over all lanes of a warp. Each lane has COUNT sums (a power of two); lane l gets the
// total of sum l % COUNT. As long as a lane has several sums, it keeps half of them and sends the
// other half to another lane.
template <int COUNT, int MASK = 1, typename Sum>
ARK_DEVICE Sum ark_matmul_thin_lanes(Sum* sums) {
  if constexpr (COUNT == 1) {
#pragma unroll
    for (int mask = MASK; mask < ARK_LANES; mask *= 2) sums[0] += ark_other_sum(sums[0], mask);
    return sums[0];
  } else {
    const bool odd = ark_lane() & MASK;
#pragma unroll
    for (int e = 0; e < COUNT / 2; ++e) {
      const Sum kept = odd ? sums[2 * e + 1] : sums[2 * e];
      sums[e] = kept + ark_other_sum(odd ? sums[2 * e] : sums[2 * e + 1], MASK);
    }
    return ark_matmul_thin_lanes<COUNT / 2, 2 * MASK>(sums);
  }
}

// The number of sums that one call of ark_matmul_thin_lanes adds over the lanes of a warp. A thread
// has `count` sums in total; a larger number per call would need too many registers.
ARK_DEVICE constexpr int ark_matmul_thin_group(int count) {
  return count > 8 ? 1 : count > 4 ? 8 : count > 2 ? 4 : count;
}

// Computes a task's products if both matrices are contiguous along k. TEAM warps compute the
// products of R rows of `many` with all FEW rows of `few` at a time.
template <int MANY, int FEW, int TILE, int R, int V, int TEAM, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_thin_along(char* scratch, int first, int k0, int k1, const A& many,
                                      const B& few, const Finish& finish) {
  typedef decltype(ark_factor(many(0, 0))) Sum;
  constexpr int TEAMS = ARK_WARPS / TEAM, STEP = TEAM * ARK_LANES * V, EACH = R * FEW;
  constexpr int GROUP = ark_matmul_thin_group(EACH), GROUPS = (EACH + GROUP - 1) / GROUP;
  constexpr int AT_ONCE = R > 4 ? 1 : 4;
  const int end = first + TILE < MANY ? first + TILE : MANY;
  Sum* parts = reinterpret_cast<Sum*>(scratch);
  for (int at = first; at < end; at += TEAMS * R) {
    const int begin = at + ark_warp() / TEAM * R;
    Sum sums[GROUPS * GROUP] = {};
    if (begin < end) {
      decltype(many(0, 0)) from[R];
#pragma unroll
      for (int r = 0; r < R; ++r) from[r] = many(begin + r < end ? begin + r : end - 1, k0);
#pragma unroll AT_ONCE
      for (int k = (ark_warp() % TEAM * ARK_LANES + ark_lane()) * V; k < k1 - k0; k += STEP) {
        decltype(ark_load_pack<V>(from[0])) x[R];
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = ark_load_pack<V>(from[r] + k);
#pragma unroll
        for (int j = 0; j < FEW; ++j) {
          const auto y = ark_load_pack<V>(few(j, k0) + k);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const auto factor = ark_factor(y.v + v);
#pragma unroll
            for (int r = 0; r < R; ++r) {
              ark_add_product(sums[r * FEW + j], ark_factor(x[r].v + v), factor);
            }
          }
        }
      }
    }
    if (TEAM > 1 && at > first) ark_sync();
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const Sum sum = ark_matmul_thin_lanes<GROUP>(sums + g * GROUP);
      const int e = g * GROUP + ark_lane();
      const bool mine = ark_lane() < GROUP && e < EACH;
      if constexpr (TEAM > 1) {
        if (mine) parts[ark_warp() * EACH + e] = sum;
      } else if (mine && begin + e / FEW < end) {
        finish(begin + e / FEW, e % FEW, sum);
      }
    }
    if constexpr (TEAM > 1) {
      ark_sync();
      ark_matmul_thin_totals<TEAMS, TEAM, EACH>(parts, [&](int e, Sum sum) {
        if (at + e / FEW < end) finish(at + e / FEW, e % FEW, sum);
      });
    }
  }
}

// Computes a task's products if `many` is contiguous along the index of its MANY rows instead of
// along k. TILE / V threads side by side compute V neighbouring rows each. The other threads
// compute the same rows, for other parts of k.
template <int MANY, int FEW, int TILE, int V, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_thin_across(char* scratch, int first, int k0, int k1, const A& many,
                                       const B& few, const Finish& finish) {
  typedef decltype(ark_factor(many(0, 0))) Sum;
  constexpr int ACROSS = TILE / V, DEEP = ARK_THREADS / ACROSS, EACH = FEW * TILE;
  constexpr int AT_ONCE = FEW > 8 ? 2 : 8;
  const int column = ark_lane() % ACROSS * V;
  Sum sums[FEW * V] = {};
  if (first + column < MANY) {
#pragma unroll AT_ONCE
    for (int k = k0 + ark_tid() / ACROSS; k < k1; k += DEEP) {
      const auto x = ark_load_pack<V>(many(first + column, k));
#pragma unroll
      for (int j = 0; j < FEW; ++j) {
        const auto factor = ark_factor(few(j, k));
#pragma unroll
        for (int v = 0; v < V; ++v) ark_add_product(sums[j * V + v], ark_factor(x.v + v), factor);
      }
    }
  }
  Sum* parts = reinterpret_cast<Sum*>(scratch);
#pragma unroll
  for (int e = 0; e < FEW * V; ++e) {
    for (int mask = ACROSS; mask < ARK_LANES; mask *= 2) sums[e] += ark_other_sum(sums[e], mask);
    if (ark_lane() < ACROSS) parts[ark_warp() * EACH + e / V * TILE + column + e % V] = sums[e];
  }
  ark_sync();
  ark_matmul_thin_totals<1, ARK_WARPS, EACH>(parts, [&](int e, Sum sum) {
    if (first + e % TILE < MANY) finish(first + e % TILE, e / TILE, sum);
  });
}
