// Products of a matrix `many` with a matrix `few` that has 9 to 16 rows (or columns), if the
// processor's first cache does not keep `few` beside the loads of `many`. Arguments are those of
// matmul_thin.h. Both matrices are contiguous along k.

// Both matrices pass through a ring of STAGES stages in shared memory, so that no lane waits for
// its loads of `few`. A team of TEAM warps multiplies R rows of `many` with all rows of `few`. A
// stage has TEAM packs of each lane from each row of `few` and from each row of `many` that the
// block multiplies at a time.
template <int MANY, int FEW, int TILE, int R, int V, int TEAM, int STAGES, class A, class B,
          class Finish>
ARK_DEVICE void ark_matmul_thin_staged(char* scratch, int first, int k0, int k1, const A& many,
                                       const B& few, const Finish& finish) {
  typedef decltype(ark_factor(many(0, 0))) Sum;
  typedef decltype(ark_load_pack<V>(many(0, 0))) Pack;
  constexpr int TEAMS = ARK_WARPS / TEAM, PACKS = TEAM * ARK_LANES, EACH = R * FEW;
  constexpr int HIGH = TEAMS * R < TILE ? TEAMS * R : (TILE + R - 1) / R * R, ROWS = FEW + HIGH;
  constexpr int GROUP = EACH % ARK_LANES == 0 ? ARK_LANES : 4;
  static_assert(ARK_THREADS % PACKS == 0 && EACH % GROUP == 0, "equal shares");
  const int end = first + TILE < MANY ? first + TILE : MANY;
  const int steps = (k1 - k0 + PACKS * V - 1) / (PACKS * V);
  const int team = ark_warp() / TEAM, own = ark_tid() % PACKS;
  Pack* stages = reinterpret_cast<Pack*>(scratch);
  Sum* parts = reinterpret_cast<Sum*>(scratch);
  for (int at = first; at < end; at += HIGH) {
    const auto copy = [&](int step) {
      Pack* to = stages + step % STAGES * (ROWS * PACKS) + own;
      const int ahead = k0 + (step * PACKS + own) * V;
      const bool here = ahead < k1;
      const int k = here ? ahead : k0;
#pragma unroll
      for (int row = ark_tid() / PACKS; row < ROWS; row += ARK_THREADS / PACKS) {
        const int line = at + row - FEW;
        if (line >= end) break;  // the sums of these rows are not used
        const auto* from = row < FEW ? few(row, k) : many(line, k);
        ark_copy_pack(reinterpret_cast<char*>(to + row * PACKS),
                      reinterpret_cast<const char*>(from), here);
      }
    };
    if (at > first) ark_sync();  // all threads have read the sums of the previous rows
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
      if (step < steps) copy(step);
      ark_copies_begun();
    }
    Sum sums[EACH] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ark_copies_but<STAGES - 2>();
      ark_sync();
      if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
      ark_copies_begun();
      if (team * R >= HIGH) continue;
      const Pack* stage = stages + step % STAGES * (ROWS * PACKS) + own;
      Pack x[R];
#pragma unroll
      for (int r = 0; r < R; ++r) x[r] = stage[(FEW + team * R + r) * PACKS];
#pragma unroll
      for (int j = 0; j < FEW; ++j) {
        const Pack y = stage[j * PACKS];
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
    ark_copies_but<0>();
    ark_sync();
#pragma unroll
    for (int g = 0; g < EACH / GROUP; ++g) {
      const Sum sum = ark_matmul_thin_lanes<GROUP>(sums + g * GROUP);
      if (ark_lane() < GROUP) parts[ark_warp() * EACH + g * GROUP + ark_lane()] = sum;
    }
    ark_sync();
    ark_matmul_thin_totals<TEAMS, TEAM, EACH>(parts, [&](int e, Sum sum) {
      if (e / FEW < HIGH && at + e / FEW < end) finish(at + e / FEW, e % FEW, sum);
    });
  }
}
