// Rows and reductions. All sums are trees whose form follows from the shapes alone, so that results
// are the same bits in every run.

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
struct ArkMaxFold {
  ARK_DEVICE float none(float) { return -ark_inf(); }
  ARK_DEVICE ark_i32 none(ark_i32) { return -2147483647 - 1; }
  ARK_DEVICE ark_i64 none(ark_i64) { return -9223372036854775807ll - 1; }
  template <typename T>
  ARK_DEVICE T join(T a, T b) {
    return b > a ? b : a;
  }
};
struct ArkMinFold {
  ARK_DEVICE float none(float) { return ark_inf(); }
  ARK_DEVICE ark_i32 none(ark_i32) { return 2147483647; }
  ARK_DEVICE ark_i64 none(ark_i64) { return 9223372036854775807ll; }
  template <typename T>
  ARK_DEVICE T join(T a, T b) {
    return b < a ? b : a;
  }
};

ARK_DEVICE ark_i32 ark_shfl_bits(ark_i32 v, int mask) {
  return static_cast<ark_i32>(ark_shfl_xor(static_cast<ark_u32>(v), mask));
}
ARK_DEVICE float ark_shfl_bits(float v, int mask) { return ark_shfl_xor(v, mask); }
ARK_DEVICE ark_i64 ark_shfl_bits(ark_i64 v, int mask) {
  const ark_u64 bits = static_cast<ark_u64>(v);
  const ark_u64 high = ark_shfl_xor(static_cast<ark_u32>(bits >> 32), mask);
  return static_cast<ark_i64>(high << 32 | ark_shfl_xor(static_cast<ark_u32>(bits), mask));
}

// The warp's total in every lane.
template <class F, typename T>
ARK_DEVICE T ark_warp_fold(T v) {
#pragma unroll
  for (int mask = ARK_LANES / 2; mask > 0; mask >>= 1) v = F::join(v, ark_shfl_bits(v, mask));
  return v;
}

// R totals over a team of TEAM warps, in each of its threads. `red` holds two times R values for
// each warp of the block, used alternately, so that one barrier serves a fold. A team that is
// neither a warp nor the block needs a backend that says ARK_HAS_TEAMS.
#if !defined(ARK_HAS_TEAMS)
template <int TEAM>
ARK_DEVICE void ark_team_sync() {
  ark_sync();
}
#endif
template <class F, int TEAM, int R, typename T>
ARK_DEVICE void ark_fold(T (&v)[R], T* red, int& parity) {
#pragma unroll
  for (int r = 0; r < R; ++r) v[r] = ark_warp_fold<F>(v[r]);
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

// What a row op does: a first statistic (the row's largest element or its mean), a term of every
// element that is summed and may replace it, and the factor and value that follow.
struct ArkSoftmax {
  typedef ArkMaxFold First;
  static constexpr bool FIRST = true;
  ARK_DEVICE float centre(float most, int) { return most; }
  ARK_DEVICE float term(float& v, float most) { return v = ark_exp(v - most); }
  ARK_DEVICE float factor(float total, int, float) { return 1.0f / total; }
};
struct ArkLayerNorm {
  typedef ArkAddFold First;
  static constexpr bool FIRST = true;
  ARK_DEVICE float centre(float total, int count) { return total / static_cast<float>(count); }
  ARK_DEVICE float term(float& v, float mean) {
    v -= mean;
    return v * v;
  }
  ARK_DEVICE float factor(float total, int count, float eps) {
    return ark_rsqrt(total / static_cast<float>(count) + eps);
  }
};
struct ArkRmsNorm {
  typedef ArkAddFold First;
  static constexpr bool FIRST = false;
  ARK_DEVICE float centre(float, int) { return 0.0f; }
  ARK_DEVICE float term(float& v, float) { return v * v; }
  ARK_DEVICE float factor(float total, int count, float eps) {
    return ark_rsqrt(total / static_cast<float>(count) + eps);
  }
};

// A missing weight.
struct ArkOnes {};
ARK_DEVICE float ark_weight(ArkOnes, int) { return 1.0f; }
template <typename T>
ARK_DEVICE float ark_weight(const T* w, int k) {
  return ark_get(w, k);
}

// V weights from element k on.
template <int V>
ARK_DEVICE void ark_weights(float (&to)[V], ArkOnes, int) {
#pragma unroll
  for (int j = 0; j < V; ++j) to[j] = 1.0f;
}
template <int V, typename T>
ARK_DEVICE void ark_weights(float (&to)[V], const T* w, int k) {
  const ArkPack<T, V> pack = ark_load_pack<V>(w + k);
#pragma unroll
  for (int j = 0; j < V; ++j) to[j] = ark_get(pack.v, j);
}

// Rows of K elements in registers, E packs of V a thread, R rows at once by each team of TEAM
// warps, the next ones on their way meanwhile. at(row, in, out) gives where a row lies.
template <class OP, int K, int V, int E, int R, int TEAM, typename TI, typename TO, class Weight,
          class At>
ARK_DEVICE void ark_rows_held(const TI* in, TO* out, Weight weight, int rows, float eps, char* red,
                              const At& at) {
  constexpr int WIDTH = TEAM * ARK_LANES, TEAMS = ARK_WARPS / TEAM;
  constexpr bool WHOLE = K == WIDTH * E * V;
  const int team = TEAMS == 1 ? 0 : ark_warp() / TEAM;
  const int me = (ark_tid() - team * WIDTH) * V, step = TEAMS * R;
  float* sums = reinterpret_cast<float*>(red);
  ArkPack<TI, V> ahead[R][E];
  const auto load = [&](int first) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      ark_i64 from, to;
      at(first + r < rows ? first + r : rows - 1, from, to);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int k = e * WIDTH * V + me;
        if (WHOLE || k < K) ahead[r][e] = ark_load_pack<V>(in + from + k);
      }
    }
  };
  int first = team * R, parity = 0;
  if (team >= TEAMS) return;
  if (first < rows) load(first);
  for (; first < rows; first += step) {
    float v[R][E * V], centre[R], total[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      centre[r] = OP::First::none(0.0f);
      total[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) {
#pragma unroll
        for (int j = 0; j < V; ++j) v[r][e * V + j] = ark_get(ahead[r][e].v, j);
      }
    }
    if (first + step < rows) load(first + step);
    if (OP::FIRST) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < E * V; ++i) {
          if (WHOLE || i / V * WIDTH * V + me < K) centre[r] = OP::First::join(centre[r], v[r][i]);
        }
      }
      ark_fold<typename OP::First, TEAM>(centre, sums, parity);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      centre[r] = OP::centre(centre[r], K);
#pragma unroll
      for (int i = 0; i < E * V; ++i) {
        if (WHOLE || i / V * WIDTH * V + me < K) total[r] += OP::term(v[r][i], centre[r]);
      }
    }
    ark_fold<ArkAddFold, TEAM>(total, sums, parity);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first + r >= rows) break;
      const float factor = OP::factor(total[r], K, eps);
      ark_i64 from, to;
      at(first + r, from, to);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int k = e * WIDTH * V + me;
        if (!WHOLE && k >= K) continue;
        ArkPack<TO, V> pack;
        float by[V];
        ark_weights(by, weight, k);
#pragma unroll
        for (int j = 0; j < V; ++j) ark_put(pack.v, j, v[r][e * V + j] * factor * by[j]);
        ark_store_pack<V>(out + to + k, pack);
      }
    }
  }
}

// Any rows, one after the other by the whole block. KEEP: the row's values stay in `row`, shared
// memory of K floats; else they are read again. V sums run side by side.
template <class OP, int V, bool KEEP, typename TI, typename TO, class Weight, class At>
ARK_DEVICE void ark_rows_any(const TI* in, TO* out, Weight weight, int rows, int K, float eps,
                             char* red, float* row, const At& at) {
  float* sums = reinterpret_cast<float*>(red);
  const int bulk = K / V * V;
  int parity = 0;
  for (int r = 0; r < rows; ++r) {
    ark_i64 from, to;
    at(r, from, to);
    const TI* source = in + from;
    TO* target = out + to;
    float part[V], centre[1] = {0.0f}, total[1] = {0.0f};
    if (OP::FIRST) {
      for (int j = 0; j < V; ++j) part[j] = OP::First::none(0.0f);
      for (int k = ark_tid() * V; k < bulk; k += ARK_THREADS * V) {
        ARK_VECTOR_LOOP
        for (int j = 0; j < V; ++j) {
          const float v = ark_get(source, k + j);
          if (KEEP) row[k + j] = v;
          part[j] = OP::First::join(part[j], v);
        }
      }
      for (int k = bulk + ark_tid(); k < K; k += ARK_THREADS) {
        const float v = ark_get(source, k);
        if (KEEP) row[k] = v;
        part[0] = OP::First::join(part[0], v);
      }
      for (int j = 1; j < V; ++j) part[0] = OP::First::join(part[0], part[j]);
      centre[0] = part[0];
      ark_fold<typename OP::First, ARK_WARPS>(centre, sums, parity);
    }
    const float middle = OP::centre(centre[0], K);
    const bool kept = KEEP && OP::FIRST;
    for (int j = 0; j < V; ++j) part[j] = 0.0f;
    for (int k = ark_tid() * V; k < bulk; k += ARK_THREADS * V) {
      ARK_VECTOR_LOOP
      for (int j = 0; j < V; ++j) {
        float v = kept ? row[k + j] : ark_get(source, k + j);
        part[j] += OP::term(v, middle);
        if (KEEP) row[k + j] = v;
      }
    }
    for (int k = bulk + ark_tid(); k < K; k += ARK_THREADS) {
      float v = kept ? row[k] : ark_get(source, k);
      part[0] += OP::term(v, middle);
      if (KEEP) row[k] = v;
    }
    for (int j = 0; j < V; ++j) total[0] += part[j];
    ark_fold<ArkAddFold, ARK_WARPS>(total, sums, parity);
    const float factor = OP::factor(total[0], K, eps);
    const auto value = [&](int k) {
      float v = KEEP ? row[k] : ark_get(source, k);
      if (!KEEP) OP::term(v, middle);
      return v * factor * ark_weight(weight, k);
    };
    for (int k = ark_tid() * V; k < bulk; k += ARK_THREADS * V) {
      ARK_VECTOR_LOOP
      for (int j = 0; j < V; ++j) ark_put(target, k + j, value(k + j));
    }
    for (int k = bulk + ark_tid(); k < K; k += ARK_THREADS) ark_put(target, k, value(k));
  }
}

// The last dimension's reduction: a row of K elements is one warp's or the block's; U packs of V
// are added up in a thread while the next U are under way. finish(total) is what is stored.
template <class F, typename T, int V, int U, bool WARP, typename TI, class At, class Finish>
ARK_DEVICE void ark_reduce_rows(const TI* in, int rows, int K, char* red, const At& at,
                                const Finish& finish) {
  constexpr int WIDTH = WARP ? ARK_LANES : ARK_THREADS, REACH = (U - 1) * WIDTH * V;
  const int me = WARP ? ark_lane() : ark_tid(), step = WARP ? ARK_WARPS : 1;
  const int bulk = K / V * V;
  const bool deep = me * V + REACH < bulk;
  ArkPack<TI, V> ahead[U];
  const auto load = [&](int r, int k) {
    const TI* source = in + at(r) + k;
#pragma unroll
    for (int u = 0; u < U; ++u) ahead[u] = ark_load_pack<V>(source + u * WIDTH * V);
  };
  int parity = 0, r = WARP ? ark_warp() : 0;
  if (deep && r < rows) load(r, me * V);
  for (; r < rows; r += step) {
    const TI* source = in + at(r);
    T part[V];
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = F::none(T());
    int k = me * V;
    while (k + REACH < bulk) {
      T value[U][V];
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int j = 0; j < V; ++j) value[u][j] = T(ark_plain(ahead[u].v[j]));
      }
      k += U * WIDTH * V;
      if (k + REACH < bulk) {
        load(r, k);
      } else if (r + step < rows) {
        load(r + step, me * V);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int j = 0; j < V; ++j) part[j] = F::join(part[j], value[u][j]);
      }
    }
    for (; k < bulk; k += WIDTH * V) {
      const ArkPack<TI, V> pack = ark_load_pack<V>(source + k);
#pragma unroll
      for (int j = 0; j < V; ++j) part[j] = F::join(part[j], T(ark_plain(pack.v[j])));
    }
    for (k = bulk + me; k < K; k += WIDTH) part[0] = F::join(part[0], T(ark_plain(source[k])));
    T total[1] = {part[0]};
#pragma unroll
    for (int j = 1; j < V; ++j) total[0] = F::join(total[0], part[j]);
    ark_fold<F, WARP ? 1 : ARK_WARPS>(total, reinterpret_cast<T*>(red), parity);
    if (me == 0) finish(r, total[0]);
  }
}

// Any other dimension's reduction, for `columns` neighbouring results: the threads stand ACROSS
// packs of V wide, the rest of them divide the K elements, `stride` apart, among themselves.
template <class F, typename T, int V, int U, int ACROSS, typename TI, class Finish>
ARK_DEVICE void ark_reduce_columns(const TI* in, ark_i64 stride, int columns, int K, char* red,
                                   const Finish& finish) {
  constexpr int DEEP = ARK_THREADS / ACROSS;
  const int column = ark_tid() % ACROSS * V, deep = ark_tid() / ACROSS;
  const bool mine = column < columns && deep < DEEP;
  T part[V];
#pragma unroll
  for (int j = 0; j < V; ++j) part[j] = F::none(T());
  if (mine) {
    const TI* source = in + column;
    ArkPack<TI, V> ahead[U];
    const auto load = [&](int k) {
#pragma unroll
      for (int u = 0; u < U; ++u) ahead[u] = ark_load_pack<V>(source + (k + u * DEEP) * stride);
    };
    int k = deep;
    if (k + (U - 1) * DEEP < K) load(k);
    while (k + (U - 1) * DEEP < K) {
      ArkPack<TI, V> pack[U];
#pragma unroll
      for (int u = 0; u < U; ++u) pack[u] = ahead[u];
      k += U * DEEP;
      if (k + (U - 1) * DEEP < K) load(k);
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int j = 0; j < V; ++j) part[j] = F::join(part[j], T(ark_plain(pack[u].v[j])));
      }
    }
    for (; k < K; k += DEEP) {
      const ArkPack<TI, V> pack = ark_load_pack<V>(source + k * stride);
#pragma unroll
      for (int j = 0; j < V; ++j) part[j] = F::join(part[j], T(ark_plain(pack.v[j])));
    }
  }
  T* sums = reinterpret_cast<T*>(red);
  ark_sync();
  if (mine) {
#pragma unroll
    for (int j = 0; j < V; ++j) sums[deep * ACROSS * V + column + j] = part[j];
  }
  ark_sync();
  for (int c = ark_tid(); c < columns; c += ARK_THREADS) {
    T total = sums[c];
    for (int d = 1; d < DEEP; ++d) total = F::join(total, sums[d * ACROSS * V + c]);
    finish(c, total);
  }
}

// The same by one thread: row after row is added to `columns` sums.
template <class F, typename T, typename TI, class Finish>
ARK_DEVICE void ark_reduce_columns_alone(const TI* in, ark_i64 stride, int columns, int K,
                                         char* red, const Finish& finish) {
  T* sums = reinterpret_cast<T*>(red);
  for (int c = 0; c < columns; ++c) sums[c] = F::none(T());
  for (int k = 0; k < K; ++k) {
    ARK_VECTOR_LOOP
    for (int c = 0; c < columns; ++c) sums[c] = F::join(sums[c], T(ark_plain(in[k * stride + c])));
  }
  for (int c = 0; c < columns; ++c) finish(c, sums[c]);
}
