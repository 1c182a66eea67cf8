// Device functions for a mixture of experts: top-k of a row, and linear layers of the chosen
// experts. experts.py describes operands and tasks.

// The order of topk: true if a comes before b in its result. By default, larger elements come
// first, and NaN before all numbers. With LEAST, smaller elements come first, and NaN after all
// numbers.
template <bool LEAST>
ARK_DEVICE bool ark_before(float a, float b) {
  return LEAST ? a > b || (a == a && b != b) : ark_above(a, b);
}

#if !defined(ARK_HAS_WARP_LARGEST)
// The largest number of a warp's lanes. A backend may have a faster implementation.
ARK_DEVICE ark_u32 ark_warp_largest(ark_u32 v) {
  for (int mask = ARK_LANES / 2; mask > 0; mask /= 2) {
    const ark_u32 other = ark_shfl_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
}
#endif

// Finds the K best of a row's N elements by one thread. The thread keeps the K best elements so far
// in order. Most elements are worse than the last of these K, so they need only one comparison.
// SOFTMAX: 1 to store the softmax of the results, 2 to find the best of the row's softmax.
template <int N, int K, bool LEAST, int SOFTMAX, class X, class V, class I>
ARK_DEVICE void ark_topk_alone(int row, X x, V values, I indices) {
  float best[K];
  ark_u32 at[K];
  for (int j = 0; j < K; ++j) {
    best[j] = -ark_inf();
    at[j] = 0xffffffffu;
  }
  const auto* from = ark_address(x, 0, 0, row, 0);
  const ark_i64 apart = ark_address(x, 0, 0, row, 1) - from;
  const auto element = [&](ark_u32 i) { return ark_get(from + i * apart, 0); };
  float most = -ark_inf(), total = 0.0f;
  for (int i = 0; SOFTMAX == 2 && i < N; ++i) most = element(i) > most ? element(i) : most;
  for (int i = 0; SOFTMAX == 2 && i < N; ++i) total += ark_exp(element(i) - most);
  for (int i = 0; i < N; ++i) {
    const float x = element(i);
    const bool full = at[K - 1] != 0xffffffffu;
    // A smaller element has no larger softmax, so most elements need no ark_exp.
    if (SOFTMAX == 2 && full && !ark_before<false>(x, element(at[K - 1]))) continue;
    const float v = SOFTMAX == 2 ? ark_exp(x - most) / total : LEAST ? -x : x;
    if (full && !ark_before<LEAST>(v, best[K - 1])) continue;
    int j = K - 1;
    for (; j > 0 && (at[j - 1] == 0xffffffffu || ark_before<LEAST>(v, best[j - 1])); --j) {
      best[j] = best[j - 1];
      at[j] = at[j - 1];
    }
    best[j] = v;
    at[j] = static_cast<ark_u32>(i);
  }
  if (SOFTMAX == 1) {
    most = best[0];
    for (int j = 0; j < K; ++j) total += best[j] = ark_exp(best[j] - most);
    for (int j = 0; j < K; ++j) best[j] /= total;
  }
  for (int j = 0; j < K; ++j) {
    ark_put(ark_address(values, 0, 0, row, j), 0, LEAST ? -best[j] : best[j]);
    *ark_address(indices, 0, 0, row, j) = static_cast<ark_i32>(at[j]);
  }
}

// Finds the K best of a row's N elements by a warp (WARP) or by the block, in K rounds. Each round
// finds the best of the elements that come after the preceding round's result in the order of topk.
// red: 2 * ARK_WARPS words of shared memory.
template <int N, int K, bool LEAST, bool WARP, class In, class Finish>
ARK_DEVICE void ark_topk_rounds(int r, float* red, const In& in, const Finish& finish) {
  constexpr int STEP = WARP ? ARK_LANES : ARK_THREADS;
  const int me = WARP ? ark_lane() : ark_tid();
  float last = ark_inf();
  ark_u32 before = 0u;
  for (int j = 0; j < K; ++j) {
    float best = -ark_inf();
    ark_u32 at = 0xffffffffu;
    for (int i = me; i < N; i += STEP) {
      const float x = ark_get(in(r, i), 0);
      ark_u32 place = static_cast<ark_u32>(i);
      float v = LEAST ? -x : x;
      if (LEAST) {
        place = x != x ? place | ~ARK_PLACE : place;
        v = x != x ? -ark_inf() : v;
      } else {
        ark_ranked(v, place, x != x ? place : 0xffffffffu);
      }
      if (j > 0 && !ark_better(last, before, v, place)) continue;
      if (ark_better(v, place, best, at)) {
        best = v;
        at = place;
      }
    }
    if (WARP) {
      ark_warp_best(best, at);
    } else {
      ark_best(best, at, red);
    }
    const ark_u32 found = at & ARK_PLACE;
    if (me == 0) finish(r, j, ark_get(in(r, static_cast<int>(found)), 0), found);
    last = best;
    before = at;
  }
}

// Finds the K best of the N elements of each row, by one warp per row. The warp's lanes hold the K
// best elements so far, in order. A lane loads U packs of V neighbouring elements while it
// processes the preceding packs. Elements that belong to the K best are inserted one after the
// other, the best first. Rows with NaN are read a second time.
template <int N, int K, int V, bool LEAST, int SOFTMAX, class In, class Finish>
ARK_DEVICE void ark_topk_rows(int rows, const In& in, const Finish& finish) {
  constexpr int U = 16 / V, WIDTH = ARK_LANES * V, piece = U * WIDTH;
  const int lane = ark_lane(), me = lane * V;
  const int left = lane ^ (lane > 0 ? lane - 1 : 0), last = lane ^ (K - 1);
  decltype(ark_held<V>(in(0, 0))) ahead[U] = {};
  const auto load = [&](int r, int begin) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = begin + u * WIDTH + me;
      if (k < N) ark_hold(ahead[u], in(r, k));
    }
  };
  const float none = ark_inf() - ark_inf();  // NaN
  int r = ark_warp();
  if (r < rows) load(r, 0);
  for (; r < rows; r += ARK_WARPS) {
    float mine = -ark_inf(), least = -ark_inf();
    ark_u32 at = 0xffffffffu;
    bool open = true;  // true if fewer than K elements have been found
    bool odd = false;  // true if an element was NaN
    for (int begin = 0; begin < N; begin += piece) {
      float v[U * V], most = -ark_inf();
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto pack = ark_unpacked(ahead[u]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const bool within = begin + u * WIDTH + me < N;
          const float given = within ? ark_get(pack.v, j) : none, x = LEAST ? -given : given;
          odd = odd || (within && x != x);
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
    if (SOFTMAX && ark_ballot(odd) == 0u) {  // the first lane has the largest
      const float most = ark_warp_max(mine), own = lane < K ? ark_exp(mine - most) : 0.0f;
      mine = own / ark_warp_sum(own);
    }
    if (ark_ballot(odd) != 0u) {
      // If the result is a softmax, NaN sorts as the largest key. A NaN in the row is then among
      // the K chosen elements and makes the softmax NaN.
      const auto number = [&](int row, int j, float v, ark_u32 at) {
        finish(row, j, SOFTMAX ? none : v, at);
      };
      ark_topk_rounds<N, K, LEAST, true>(r, nullptr, in, number);
    } else if (lane < K) {
      finish(r, lane, LEAST ? -mine : mine, at);
    }
  }
}

// Replaces a row of N elements, of which a lane holds EACH neighbouring ones, by its softmax.
template <int N, int EACH>
ARK_DEVICE void ark_softmax_of_lanes(float (&v)[EACH]) {
  float most = -ark_inf(), total = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) most = v[e] > most ? v[e] : most;
  most = ark_warp_max(most);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    v[e] = ark_lane() * EACH + e < N ? ark_exp(v[e] - most) : 0.0f;
    total += v[e];
  }
  total = ark_warp_sum(total);
#pragma unroll
  for (int e = 0; e < EACH; ++e) v[e] /= total;
}

// Like ark_topk_rows, for short rows: a warp has one row, of which a lane holds neighbouring
// elements as keys. Each round finds the largest key and the first element that has it.
template <int N, int K, int SOFTMAX, class In, class Finish>
ARK_DEVICE void ark_topk_short(int rows, const In& in, const Finish& finish) {
  constexpr int EACH = (N + ARK_LANES - 1) / ARK_LANES;
  const int lane = ark_lane();
  for (int r = ark_warp(); r < rows; r += ARK_WARPS) {
    float v[EACH];
    ark_u32 key[EACH];  // 0 for none
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int i = lane * EACH + e;
      v[e] = i < N ? ark_get(in(r, i), 0) : -ark_inf();
    }
    if (SOFTMAX == 2) ark_softmax_of_lanes<N>(v);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const ark_u32 order = v[e] == v[e] ? ark_ordered(v[e] + 0.0f) : 0xffffffffu;
      key[e] = lane * EACH + e < N ? order : 0u;
    }
    float mine = -ark_inf(), most = 0.0f;
    ark_u32 at = 0u;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      ark_u32 best = 0u, first = 0xffffffffu;
#pragma unroll
      for (int e = 0; e < EACH; ++e) best = key[e] > best ? key[e] : best;
      best = ark_warp_largest(best);
#pragma unroll
      for (int e = EACH - 1; e >= 0; --e) {
        first = key[e] == best ? static_cast<ark_u32>(lane * EACH + e) : first;
      }
      first = ~ark_warp_largest(~first);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        key[e] = first == static_cast<ark_u32>(lane * EACH + e) ? 0u : key[e];
      }
      const float value = ark_bits_float(best >> 31 != 0u ? best & 0x7fffffffu : ~best);
      if (j == 0) most = value;
      mine = lane == j ? value : mine;
      at = lane == j ? first : at;
    }
    if (SOFTMAX == 1) {
      const float own = lane < K ? ark_exp(mine - most) : 0.0f;
      mine = own / ark_warp_sum(own);
    }
    if (lane < K) finish(r, lane, mine, at);
  }
}

// A sort key that is larger for an element that comes first: by value, and for equal values by
// index. Never 0.
template <bool LEAST>
ARK_DEVICE ark_u64 ark_rank_of(float x, ark_u32 place) {
  const float v = LEAST ? -x : x;
  const ark_u32 bits = ark_float_bits(v + 0.0f);  // zeros of both signs are equal
  const ark_u32 number = bits >> 31 != 0u ? ~bits : bits | 0x80000000u;
  const ark_u32 order = v == v ? number : LEAST ? 0u : 0xffffffffu;
  return static_cast<ark_u64>(order) << 32 | static_cast<ark_u32>(~place);
}

// One step of Batcher's bitonic sort, in descending order: compares `pairs` pairs of keys, `stride`
// keys apart, and exchanges the keys of a pair if the second key is larger. With TURNS, every other
// run of `size` keys is sorted in ascending order.
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

// Finds the K best of the N elements of each row, by the block. The row is in shared memory as P
// sort keys (P is a power of two, and K <= S <= P). First, runs of S keys are sorted. Then pairs of
// runs are merged, and only the S best keys of a pair are kept, until one run is left.
template <int N, int K, int P, int S, bool LEAST, class In, class Finish>
ARK_DEVICE void ark_topk_sorted(int rows, ark_u64* keys, const In& in, const Finish& finish) {
  for (int r = 0; r < rows; ++r) {
    for (int i = ark_tid(); i < P; i += ARK_THREADS) {
      keys[i] = i < N ? ark_rank_of<LEAST>(ark_get(in(r, i), 0), static_cast<ark_u32>(i)) : 0u;
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
      const ark_u32 at = ~static_cast<ark_u32>(keys[j]);
      finish(r, j, ark_get(in(r, static_cast<int>(at)), 0), at);
    }
    ark_sync();
  }
}

// Finds the K best elements of each row of a task. Task coordinates: first row. A task has ROWS of
// the LIMIT rows. WARP: each row is processed by one warp, in packs (vectors) of V elements or,
// with SHORT, as a short row. Otherwise each row is processed by the whole block. The block sorts
// the row as P keys in shared memory or, if P is 0, finds one result per round: the best of the
// elements that come after the preceding result.
template <int ROWS, int LIMIT, int N, int K, int V, bool WARP, bool SHORT, int P, int S, bool LEAST,
          int SOFTMAX, class X, class O, class I>
ARK_DEVICE void ark_topk(ArkCtx& c, const ArkTask& t, X x, O values, I indices, ark_u64 address) {
  const int begin = t.coord[0], rows = begin + ROWS < LIMIT ? ROWS : LIMIT - begin;
  const auto in = [&](int r, int k) { return ark_address(x, 0, 0, begin + r, k); };
  const auto finish = [&](int r, int j, float v, ark_u32 at) {
    ark_put(ark_address(values, 0, 0, begin + r, j), 0, v);
    *ark_address(indices, 0, 0, begin + r, j) = static_cast<ark_i32>(at);
  };
  if constexpr (ARK_THREADS == 1 && K <= 64) {
    for (int r = 0; r < rows; ++r)
      ark_topk_alone<N, K, LEAST, SOFTMAX>(begin + r, x, values, indices);
    return;
  }
  if constexpr (SHORT) {
    ark_topk_short<N, K, SOFTMAX>(rows, in, finish);
    return;
  }
  if constexpr (WARP) {
    if (V == 1 || ark_aligned(address)) {
      ark_topk_rows<N, K, V, LEAST, SOFTMAX>(rows, in, finish);
    } else {
      ark_topk_rows<N, K, 1, LEAST, SOFTMAX>(rows, in, finish);
    }
    return;
  }
  if constexpr (P > 0) {
    ark_topk_sorted<N, K, P, S, LEAST>(rows, reinterpret_cast<ark_u64*>(ARK_SCRATCH(c)), in,
                                       finish);
    return;
  }
  float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int r = 0; r < rows; ++r) ark_topk_rounds<N, K, LEAST, false>(r, red, in, finish);
}

// Copies the input of a row's slot (one of its chosen experts) to `xs`, and returns the slot's
// expert as an index relative to FIRST. An expert outside of 0 to OF - 1 is an error.
template <int K, bool SLOTS, int FIRST, int OF, class X, class E>
ARK_DEVICE int ark_expert_input(ArkCtx& c, int row, int slot, const X& x, const E& experts,
                                float* xs) {
  for (int i = ark_tid(); i < K; i += ARK_THREADS) {
    xs[i] = SLOTS ? ark_load(c, x, 0, row, slot, i) : ark_load(c, x, 0, 0, row, i);
  }
  int expert = *ark_address(experts, 0, 0, row, slot);
  if (expert < 0 || expert >= OF) {
    if (ark_tid() == 0) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
    }
    expert = FIRST;
  }
  return expert - FIRST;
}

// The epilogue of an output of the experts (expert_epilogue.py). `ahead` loads the EXTRA numbers
// that it needs, `term` computes the value of a slot (one chosen expert of a row) from the sums and
// these numbers, `left` loads the number that is added to a row's total, and `store` stores the
// result.
template <int COUNT, class A, class T, class L, class S>
struct ArkExpertFinish {
  static constexpr int EXTRA = COUNT;
  const A& ahead;
  const T& term;
  const L& left;
  const S& store;
};
template <int COUNT, class A, class T, class L, class S>
ARK_DEVICE ArkExpertFinish<COUNT, A, T, L, S> ark_expert_finish(const A& ahead, const T& term,
                                                                const L& left, const S& store) {
  return {ahead, term, left, store};
}

constexpr int ARK_EXPERT_TOTALS = 256;  // outputs whose totals shared memory holds

// Multiplies rows by the weights of their chosen experts. Task coordinates: row, slot (one chosen
// expert of the row), first output, and last output + 1. SLOTS: true if each slot has its own row
// of the input, false if all slots of a row read the same input row. The weights (WEIGHTS of them)
// contain EXPERTS of all OF experts, from number FIRST on. The results of the other experts are
// zero. TOTAL: the number of slots that a task adds up, or 0. dot(weight, expert, output, xs): a
// lane's part of a dot product.
template <int EXPERTS, int K, bool SLOTS, int FIRST, int OF, int WEIGHTS, int TOTAL, class X,
          class E, class D, class F>
ARK_DEVICE void ark_expert_products(ArkCtx& c, const ArkTask& t, const X& x, const E& experts,
                                    const D& dot, const F& finish) {
  const int row = t.coord[0], end = t.coord[3];
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* totals = xs + K;
  const int step = TOTAL > 0 ? ARK_EXPERT_TOTALS : end - t.coord[2];
  const int first = TOTAL > 0 ? 0 : t.coord[1], last = TOTAL > 0 ? TOTAL : first + 1;
  for (int top = t.coord[2]; top < end; top += step) {
    const int bottom = top + step < end ? top + step : end;
    for (int slot = first; slot < last; ++slot) {
      if (TOTAL > 0) ark_sync();  // all threads have read the previous slot's input
      const int expert = ark_expert_input<K, SLOTS, FIRST, OF>(c, row, slot, x, experts, xs);
      const bool held = OF <= EXPERTS || (expert >= 0 && expert < EXPERTS);
      ark_sync();
      for (int i = top + ark_warp(); i < bottom; i += ARK_WARPS) {
        float sum[WEIGHTS];
        for (int w = 0; w < WEIGHTS; ++w) {
          sum[w] = ark_warp_sum(held ? dot(w, expert, i, xs) : 0.0f);
        }
        if (ark_lane() == 0) {
          float with[F::EXTRA];
          finish.ahead(row, slot, expert, i, with);
          float v = finish.term(sum, with);
          if (TOTAL > 0) {
            if (slot > 0) v += totals[i - top];
            totals[i - top] = v;
          }
          if (TOTAL == 0) finish.store(row, slot, i, v);
          if (TOTAL > 0 && slot + 1 == last) finish.store(row, 0, i, v + finish.left(row, i));
        }
      }
    }
  }
}

// Calls ark_expert_products for weights of floating-point types, of shape (EXPERTS, N, K).
template <int EXPERTS, int N, int K, bool SLOTS, int FIRST, int OF, int WEIGHTS, int TOTAL, class X,
          class W, class E, class F>
ARK_DEVICE void ark_expert_linear(ArkCtx& c, const ArkTask& t, X x, W first, W second, E experts,
                                  const F& finish) {
  const auto dot = [&](int w, int expert, int i, const float* xs) {
    const auto* rows = w > 0 ? second.p : first.p;
    return ark_row_dot(rows + (static_cast<ark_i64>(expert) * N + i) * K, xs, K);
  };
  ark_expert_products<EXPERTS, K, SLOTS, FIRST, OF, WEIGHTS, TOTAL>(c, t, x, experts, dot, finish);
}
