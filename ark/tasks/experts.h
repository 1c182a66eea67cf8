// A mixture of experts. What a task computes and touches is said in experts.py.

// coord: row. By one thread: the best K so far in order, of which most elements are less than the
// last. What is no number is never chosen.
template <int N, int K, class X, class V, class I>
ARK_DEVICE void ark_topk_alone(int row, X x, V values, I indices) {
  float best[K];
  ark_u32 at[K];
  for (int j = 0; j < K; ++j) {
    best[j] = -ark_inf();
    at[j] = 0xffffffffu;
  }
  const auto* from = ark_address(x, 0, 0, row, 0);
  const ark_i64 apart = ark_address(x, 0, 0, row, 1) - from;
  for (int i = 0; i < N; ++i) {
    const float v = ark_get(from + i * apart, 0);
    if (!(v > best[K - 1] || (v == best[K - 1] && at[K - 1] == 0xffffffffu))) continue;
    int j = K - 1;
    for (; j > 0 && (v > best[j - 1] || at[j - 1] == 0xffffffffu); --j) {
      best[j] = best[j - 1];
      at[j] = at[j - 1];
    }
    best[j] = v;
    at[j] = static_cast<ark_u32>(i);
  }
  for (int j = 0; j < K; ++j) {
    ark_put(ark_address(values, 0, 0, row, j), 0, best[j]);
    *ark_address(indices, 0, 0, row, j) = static_cast<ark_i32>(at[j]);
  }
}

// Rows by a warp each: the best so far are in order in its lanes, and of U packs of V neighbours a
// lane those that belong to the K best go in one after the other, the best first. The next packs
// are on their way.
template <int N, int K, int V, class In, class Finish>
ARK_DEVICE void ark_topk_rows(int rows, const In& in, const Finish& finish) {
  constexpr int U = 16 / V, WIDTH = ARK_LANES * V, piece = U * WIDTH;
  const int lane = ark_lane(), me = lane * V;
  const int left = lane ^ (lane > 0 ? lane - 1 : 0), last = lane ^ (K - 1);
  decltype(ark_held<V>(in(0, 0))) ahead[U];
  const auto load = [&](int r, int begin) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = begin + u * WIDTH + me;
      if (k < N) ark_hold(ahead[u], in(r, k));
    }
  };
  const float none = ark_inf() - ark_inf();  // neither greater nor equal
  int r = ark_warp();
  if (r < rows) load(r, 0);
  for (; r < rows; r += ARK_WARPS) {
    float mine = -ark_inf(), least = -ark_inf();
    ark_u32 at = 0xffffffffu;
    bool open = true;  // are there fewer than K so far?
    for (int begin = 0; begin < N; begin += piece) {
      float v[U * V], most = -ark_inf();
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto pack = ark_unpacked(ahead[u]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float x = begin + u * WIDTH + me < N ? ark_get(pack.v, j) : none;
          v[u * V + j] = x;
          most = x > most ? x : most;
        }
      }
      if (begin + piece < N) {
        load(r, begin + piece);
      } else if (r + ARK_WARPS < rows) {
        load(r + ARK_WARPS, 0);
      }
      ark_u32 taken = 0xffffffffu;
      while (ark_ballot(open || most > least) != 0u) {
        float best = -ark_inf();
        ark_u32 place = 0xffffffffu;
#pragma unroll
        for (int e = 0; e < U * V; ++e) {
          const ark_u32 k = static_cast<ark_u32>(begin + e / V * WIDTH + me + e % V);
          if (k == taken) v[e] = none;
          const bool better = v[e] > best || (v[e] == best && place == 0xffffffffu);
          best = better ? v[e] : best;
          place = better ? k : place;
        }
        most = best;
        ark_warp_best(best, place);
        if (place == 0xffffffffu || !(open || best > least)) break;
        taken = place;
        const bool before = at != 0xffffffffu && mine >= best;
        const ark_u64 in_front = ark_ballot(before);
        const float next = ark_shfl_xor(mine, left);
        const ark_u32 next_at = ark_shfl_xor(at, left);
        const bool first = !before && (lane == 0 || (in_front >> (lane - 1) & 1u) != 0u);
        mine = before ? mine : first ? best : next;
        at = before ? at : first ? place : next_at;
        least = ark_shfl_xor(mine, last);
        open = ark_shfl_xor(at, last) == 0xffffffffu;
      }
    }
    if (lane < K) finish(r, lane, mine, at);
  }
}

// A number that is larger for what comes first: by value, of equals by place; 0 for what is no
// number, behind everything.
ARK_DEVICE ark_u64 ark_rank_of(float v, ark_u32 place) {
  if (v != v) return 0u;
  const ark_u32 bits = ark_float_bits(v + 0.0f);  // zeros of both signs are equals
  const ark_u32 order = bits >> 31 != 0u ? ~bits : bits | 0x80000000u;
  return static_cast<ark_u64>(order) << 32 | static_cast<ark_u32>(~place);
}

// The larger of `pairs` pairs, STRIDE apart, changes places with the smaller where it comes second;
// FIRST: in runs of SIZE one way and the other (Batcher's bitonic merge).
template <bool TURNS>
ARK_DEVICE void ark_rank_pairs(ark_u64* keys, int pairs, int size, int stride) {
  for (int i = ark_tid(); i < pairs; i += ARK_THREADS) {
    const int a = 2 * i - (i & (stride - 1)), b = a + stride;
    const bool turned = TURNS && (a & size) != 0;
    const ark_u64 x = keys[a], y = keys[b];
    if (x < y != turned) {
      keys[a] = y;
      keys[b] = x;
    }
  }
  ark_sync();
}

// A row by the block, in shared memory of P numbers, P a power of two: runs of S are put in order,
// then of two runs the S best stay until there is one. K <= S <= P.
template <int N, int K, int P, int S, class In, class Finish>
ARK_DEVICE void ark_topk_sorted(int rows, ark_u64* keys, const In& in, const Finish& finish) {
  for (int r = 0; r < rows; ++r) {
    for (int i = ark_tid(); i < P; i += ARK_THREADS) {
      keys[i] = i < N ? ark_rank_of(ark_get(in(r, i), 0), static_cast<ark_u32>(i)) : 0u;
    }
    ark_sync();
    for (int size = 2; size < S; size *= 2) {
      for (int stride = size / 2; stride > 0; stride /= 2) {
        ark_rank_pairs<true>(keys, P / 2, size, stride);
      }
    }
    for (int stride = S / 2; stride > 0; stride /= 2) {
      ark_rank_pairs<false>(keys, P / 2, S, stride);
    }
    for (int left = P / 2; left >= S; left /= 2) {
      for (int i = ark_tid(); i < left; i += ARK_THREADS) {
        const ark_u64 other = keys[left + (i ^ (S - 1))];
        if (keys[i] < other) keys[i] = other;
      }
      ark_sync();
      for (int stride = S / 2; stride > 0; stride /= 2) {
        ark_rank_pairs<false>(keys, left / 2, S, stride);
      }
    }
    for (int j = ark_tid(); j < K; j += ARK_THREADS) {
      const ark_u32 at = keys[j] == 0u ? 0xffffffffu : ~static_cast<ark_u32>(keys[j]);
      finish(r, j, keys[j] == 0u ? -ark_inf() : ark_get(in(r, static_cast<int>(at)), 0), at);
    }
    ark_sync();
  }
}

// coord: first row, of ROWS of LIMIT. A row is a warp's (WARP, in packs of V), or it is put in
// order in shared memory of P numbers, or, where P is 0, each round of the block takes the best of
// what comes behind the one before.
template <int ROWS, int LIMIT, int N, int K, int V, bool WARP, int P, int S, class X, class O,
          class I>
ARK_DEVICE void ark_topk(ArkCtx& c, const ArkTask& t, X x, O values, I indices, ark_u64 address) {
  const int begin = t.coord[0], rows = begin + ROWS < LIMIT ? ROWS : LIMIT - begin;
  const auto in = [&](int r, int k) { return ark_address(x, 0, 0, begin + r, k); };
  const auto finish = [&](int r, int j, float v, ark_u32 at) {
    ark_put(ark_address(values, 0, 0, begin + r, j), 0, v);
    *ark_address(indices, 0, 0, begin + r, j) = static_cast<ark_i32>(at);
  };
  if constexpr (ARK_THREADS == 1 && K <= 64) {
    for (int r = 0; r < rows; ++r) ark_topk_alone<N, K>(begin + r, x, values, indices);
    return;
  }
  if constexpr (WARP) {
    if (V == 1 || ark_aligned(address)) {
      ark_topk_rows<N, K, V>(rows, in, finish);
    } else {
      ark_topk_rows<N, K, 1>(rows, in, finish);
    }
    return;
  }
  if constexpr (P > 0) {
    ark_topk_sorted<N, K, P, S>(rows, reinterpret_cast<ark_u64*>(ARK_SCRATCH(c)), in, finish);
    return;
  }
  for (int r = 0; r < rows; ++r) {
    float last = ark_inf();
    ark_u32 before = 0u;
    for (int j = 0; j < K; ++j) {
      float best = -ark_inf();
      ark_u32 at = 0xffffffffu;
      for (int i = ark_tid(); i < N; i += ARK_THREADS) {
        const float v = ark_get(in(r, i), 0);
        const ark_u32 place = static_cast<ark_u32>(i);
        if (j > 0 && (v > last || (v == last && place <= before))) continue;
        if (v > best || (v == best && place < at)) {
          best = v;
          at = place;
        }
      }
      ark_best(best, at, reinterpret_cast<float*>(ARK_SCRATCH(c)));
      if (ark_tid() == 0) finish(r, j, best, at);
      last = best;
      before = at;
    }
  }
}

// coord: row, slot, first and last+1 output. The input has a row a slot (SLOTS) or one for all. The
// weight has EXPERTS experts from FIRST on, of OF; the results of the others are zeros.
template <int EXPERTS, int N, int K, bool SLOTS, int FIRST, int OF, class X, class W, class E,
          class O>
ARK_DEVICE void ark_expert_linear(ArkCtx& c, const ArkTask& t, X x, W weight, E experts, O output) {
  const int row = t.coord[0], slot = t.coord[1];
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int i = ark_tid(); i < K; i += ARK_THREADS) {
    xs[i] = ark_get(SLOTS ? ark_address(x, 0, row, slot, i) : ark_address(x, 0, 0, row, i), 0);
  }
  int expert = *ark_address(experts, 0, 0, row, slot);
  if (expert < 0 || expert >= OF) {
    if (ark_tid() == 0) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
    }
    expert = FIRST;
  }
  expert -= FIRST;
  if (OF > EXPERTS && (expert < 0 || expert >= EXPERTS)) {
    for (int i = t.coord[2] + ark_tid(); i < t.coord[3]; i += ARK_THREADS) {
      ark_put(ark_address(output, 0, row, slot, i), 0, 0.0f);
    }
    return;
  }
  const auto* w = weight.p + static_cast<ark_i64>(expert) * N * K;
  ark_sync();
  for (int i = t.coord[2] + ark_warp(); i < t.coord[3]; i += ARK_WARPS) {
    const float v = ark_warp_sum(ark_row_dot(w + static_cast<ark_i64>(i) * K, xs, K));
    if (ark_lane() == 0) ark_put(ark_address(output, 0, row, slot, i), 0, v);
  }
}
