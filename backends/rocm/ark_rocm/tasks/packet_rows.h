// Ops on one row whose input may be packets: rmsnorm by a block, and the choice of the K largest
// elements by a wave.

template <int N, int EACH>
ARK_DEVICE void ark_softmax_of_lanes(float (&v)[EACH]);  // of experts.h

struct ArkMost {
  ARK_DEVICE ark_u32 of(ark_u32 a, ark_u32 b) { return a > b ? a : b; }
};

// Computes the rmsnorm of one row x of K elements. Returns false if a wait has failed or the launch
// was aborted; the processor must then leave the loop.
template <int K, class X, class W, class O>
ARK_DEVICE bool ark_packet_rmsnorm(ArkCtx& c, const ArkTask&, X x, W weight, O output, float eps) {
  typedef ArkPacketRows<K, 1, false> Row;
  if (!ark_enter(c)) return false;
  float factors[Row::EACH], squares = 0.0f;
#pragma unroll
  for (int e = 0; e < Row::EACH; ++e) factors[e] = ark_get(weight.p, Row::at(e));
  Row row;
  row.load(x, 0, 0);
  row.take(c, x, 0, 0, [] {});
#pragma unroll
  for (int e = 0; e < Row::EACH; ++e) {
    const float v = ark_tid() + e * ARK_THREADS < K ? row.v[0][e] : 0.0f;
    squares += v * v;
  }
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const float scale = ark_rsqrt(ark_block_sum(squares, red) / K + eps);
#pragma unroll
  for (int e = 0; e < Row::EACH; ++e) {
    const int k = ark_tid() + e * ARK_THREADS;
    if (k < K) ark_put(output.p, k, row.v[0][e] * scale * factors[e]);
  }
  return true;
}

// Finds the K largest of the N elements of a row, in descending order, and their indices. NaN
// counts as the largest. With SOFTMAX, stores the softmax of the K elements (1), or finds the K
// largest of the softmax of the row (2). Each of K rounds finds the largest element that is left. A
// lane has EACH neighbouring elements, so that the first of equal elements is in the first lane.
template <int N, int K, int SOFTMAX, class X, class V, class I>
ARK_DEVICE bool ark_packet_topk(ArkCtx& c, const ArkTask&, X x, V values, I indices) {
  constexpr int EACH = (N + ARK_LANES - 1) / ARK_LANES;
  if (!ark_enter(c)) return false;
  if (ark_warp() > 0) return true;
  const int lane = ark_lane();
  const auto at = [&](int e) { return lane * EACH + e < N ? lane * EACH + e : N - 1; };
  float v[EACH];
  if constexpr (X::packets) {
    ark_u64 seen[EACH] = {};
    bool all = false;
    while (!all && !ark_failed(c)) {
      all = true;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        seen[e] = ark_packet_load(ark_address(x, 0, 0, 0, at(e)), X::system);
      }
      const ark_u64* late = nullptr;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        if (!ark_packet_ready(c, seen[e])) late = ark_address(x, 0, 0, 0, at(e));
      }
      if (late != nullptr) ark_wait_packet(c, late, X::system);
      all = ark_warp_all(late == nullptr);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) v[e] = ark_bits_float(static_cast<ark_u32>(seen[e]));
  } else {
#pragma unroll
    for (int e = 0; e < EACH; ++e) v[e] = ark_load(c, x, 0, 0, 0, at(e));
  }
  if (SOFTMAX == 2) ark_softmax_of_lanes<N>(v);
  ark_u32 key[EACH];  // larger for larger elements, 0 for none
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const ark_u32 bits = ark_float_bits(v[e] + 0.0f);  // zeros of both signs are equal
    const ark_u32 number = bits >> 31 != 0u ? ~bits : bits | 0x80000000u;
    key[e] = lane * EACH + e < N ? v[e] == v[e] ? number : 0xffffffffu : 0u;
  }
  float mine = -ark_inf();
  int chosen = 0;
#pragma unroll
  for (int j = 0; j < K; ++j) {
    ark_u32 best = 0u;
#pragma unroll
    for (int e = 0; e < EACH; ++e) best = key[e] > best ? key[e] : best;
    const ark_u32 top = ark_warp_reduce<ArkMost>(best);
    const int first = static_cast<int>(__builtin_ctzll(ark_ballot(best == top)));
    int own = 0;
    float value = 0.0f;
#pragma unroll
    for (int e = EACH - 1; e >= 0; --e) {
      own = key[e] == top ? e : own;
      value = key[e] == top ? v[e] : value;
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) key[e] = lane == first && own == e ? 0u : key[e];
    const int place = ark_lane_value(lane * EACH + own, first);
    const float largest = ark_lane_value(value, first);
    mine = lane == j ? largest : mine;
    chosen = lane == j ? place : chosen;
  }
  if (SOFTMAX == 1) {
    const float none = ark_inf() - ark_inf();
    const bool odd = ark_ballot(lane < K && mine != mine) != 0u;
    const float most = ark_warp_max(mine), own = lane < K ? ark_exp(mine - most) : 0.0f;
    mine = odd ? none : own / ark_warp_sum(own);
  }
  if (lane < K) {
    ark_publish(c, values, 0, 0, 0, lane, mine);
    *ark_address(indices, 0, 0, 0, lane) = chosen;
  }
  return true;
}
