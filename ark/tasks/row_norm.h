// Softmax and norms of rows.

// The operations on rows: softmax and norms. Each has three steps. First, a statistic of the row is
// computed (its maximum or mean). Second, a term is computed from each element and added up; a term
// may replace its element. Third, a factor is computed from the sum, and the result from the
// elements and the factor.
struct ArkSoftmax {
  // The maximum may ignore NaN elements: the term of a NaN element is NaN, so the sum of the terms
  // becomes NaN anyway.
  struct First : ArkMaxFold {
    ARK_DEVICE float join(float a, float b) { return b > a ? b : a; }
  };
  static constexpr bool FIRST = true;
  ARK_DEVICE float centre(float most, int) { return most; }
  ARK_DEVICE float term(float& v, float most) { return v = ark_exp(v - most); }
  ARK_DEVICE float factor(float total, int, float) { return 1.0f / total; }
  ARK_DEVICE float value(float v, float factor) { return v * factor; }
};
// Softmax that gives zeros for a row in which all elements are -inf.
struct ArkSafeSoftmax : ArkSoftmax {
  ARK_DEVICE float centre(float most, int) { return most == -ark_inf() ? 0.0f : most; }
  ARK_DEVICE float factor(float total, int, float) { return total == 0.0f ? 0.0f : 1.0f / total; }
};
struct ArkLogSoftmax : ArkSoftmax {
  ARK_DEVICE float term(float& v, float most) {
    v -= most;
    return ark_exp(v);
  }
  ARK_DEVICE float factor(float total, int, float) { return ark_log(total); }
  ARK_DEVICE float value(float v, float factor) { return v - factor; }
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
  ARK_DEVICE float value(float v, float factor) { return v * factor; }
};
struct ArkRmsNorm {
  typedef ArkAddFold First;
  static constexpr bool FIRST = false;
  ARK_DEVICE float centre(float, int) { return 0.0f; }
  ARK_DEVICE float term(float& v, float) { return v * v; }
  ARK_DEVICE float factor(float total, int count, float eps) {
    return ark_rsqrt(total / static_cast<float>(count) + eps);
  }
  ARK_DEVICE float value(float v, float factor) { return v * factor; }
};

// A missing weight.
struct ArkOnes {};
// The scale and shift of a norm: each value is multiplied by its weight, and its bias is added.
template <typename W, typename B>
struct ArkAffine {
  const W* weight;
  const B* bias;
};
ARK_DEVICE float ark_weight(ArkOnes, int) { return 1.0f; }
template <typename T>
ARK_DEVICE float ark_weight(const T* w, int k) {
  return ark_get(w, k);
}

template <typename W, typename B>
ARK_DEVICE float ark_weight(const ArkAffine<W, B>& w, int k) {
  return ark_get(w.weight, k);
}

// Loads the weights of V neighbouring elements of a row, from element k on.
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

template <int V, typename W, typename B>
ARK_DEVICE void ark_weights(float (&to)[V], const ArkAffine<W, B>& w, int k) {
  ark_weights(to, w.weight, k);
}

// Loads the biases of V neighbouring elements of a row, from element k on. ark_biased adds a bias
// to a weighted value.
template <int V, class Weight>
ARK_DEVICE void ark_biases(float (&)[V], const Weight&, int) {}
template <int V, typename W, typename B>
ARK_DEVICE void ark_biases(float (&to)[V], const ArkAffine<W, B>& w, int k) {
  ark_weights(to, w.bias, k);
}
template <class Weight>
ARK_DEVICE float ark_biased(float v, const Weight&, float) {
  return v;
}
template <typename W, typename B>
ARK_DEVICE float ark_biased(float v, const ArkAffine<W, B>&, float bias) {
  return v + bias;
}

// The weights and biases for a thread's E packs of elements. If they take at most MOST_SCALE_BYTES
// of registers, they are loaded together with the first rows, so that no store waits for them.
// Otherwise they are loaded when they are used.
constexpr int MOST_SCALE_BYTES = 128;
template <class Weight>
constexpr int ark_scale_bytes = 0;
template <typename T>
constexpr int ark_scale_bytes<const T*> = sizeof(T);
template <typename W, typename B>
constexpr int ark_scale_bytes<ArkAffine<W, B>> = sizeof(W) + sizeof(B);

template <int V, int E, class Weight,
          bool HELD =
              (ark_scale_bytes<Weight> > 0 && ark_scale_bytes<Weight> * V * E <= MOST_SCALE_BYTES)>
struct ArkScales {
  ARK_DEVICE void ask(ArkScales&, const Weight&, int, int) {}
  ARK_DEVICE void take(const ArkScales&, float (&by)[V], float (&plus)[V], const Weight& weight,
                       int, int k) {
    ark_weights(by, weight, k);
    ark_biases(plus, weight, k);
  }
};
template <int V, int E, typename T>
struct ArkScales<V, E, const T*, true> {
  ArkHeld<T, V> packs[E];
  ARK_DEVICE void ask(ArkScales& s, const T* weight, int e, int k) {
    ark_hold(s.packs[e], weight + k);
  }
  ARK_DEVICE void take(const ArkScales& s, float (&by)[V], float (&)[V], const T*, int e, int) {
    const auto pack = ark_unpacked(s.packs[e]);
#pragma unroll
    for (int j = 0; j < V; ++j) by[j] = ark_get(pack.v, j);
  }
};
template <int V, int E, typename W, typename B>
struct ArkScales<V, E, ArkAffine<W, B>, true> {
  typedef ArkScales<V, E, const W*, true> Weights;
  typedef ArkScales<V, E, const B*, true> Biases;
  Weights weights;
  Biases biases;
  ARK_DEVICE void ask(ArkScales& s, const ArkAffine<W, B>& affine, int e, int k) {
    Weights::ask(s.weights, affine.weight, e, k);
    Biases::ask(s.biases, affine.bias, e, k);
  }
  ARK_DEVICE void take(const ArkScales& s, float (&by)[V], float (&plus)[V],
                       const ArkAffine<W, B>& affine, int e, int k) {
    Weights::take(s.weights, by, plus, affine.weight, e, k);
    Biases::take(s.biases, plus, by, affine.bias, e, k);
  }
};

// Determines which rows a team of warps processes in each round of its loop. Here the order of
// rounds is fixed; row_norm_claimed.h has a type with the same functions that claims rounds at run
// time by an atomic counter. A round is identified by the number of its first row.
//
// All threads call the three functions in each round. `ask` is called at the beginning of the
// round; in row_norm_claimed.h it claims a later round. `tell` is called after the sums of the
// round's first row, and gives the claimed number to the other threads. `told` is called at the end
// of the round with the number of the next round, and returns the number of the round after that.
struct ArkRounds {
  int first, step;
  ARK_DEVICE void ask(ArkRounds&) {}
  ARK_DEVICE void tell(ArkRounds&) {}
  ARK_DEVICE int told(ArkRounds& r, int next) { return next + r.step; }
};

// Computes OP (softmax or a norm) of rows of K elements, which are kept in registers. A row is
// processed by TEAM warps or, if PART is less than a warp, by PART lanes. A thread has E packs
// (vectors) of V elements of a row. It processes R rows while it loads the next R rows. in(row),
// out(row): the addresses of rows.
template <class OP, int K, int V, int E, int R, int TEAM, int PART = ARK_LANES, class In, class Out,
          class Weight, class Rounds>
ARK_DEVICE void ark_row_norm_held(const In& in, const Out& out, Weight weight, int rows, float eps,
                                  char* red, Rounds rounds) {
  constexpr int WIDTH = TEAM * PART, TEAMS = ARK_WARPS / TEAM, PARTS = ARK_LANES / PART;
  static_assert(TEAM == 1 || PARTS == 1, "parts are of one warp");
  constexpr bool WHOLE = K == WIDTH * E * V;
  const int team = TEAMS == 1 ? 0 : ark_warp() / TEAM;
  const int part = PARTS == 1 ? 0 : ark_lane() / PART;
  const int me = (PARTS == 1 ? ark_tid() - team * WIDTH : ark_lane() % PART) * V;
  float* sums = reinterpret_cast<float*>(red);
  decltype(ark_held<V>(in(0))) ahead[R][E] = {};
  const auto load = [&](int first) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = first + r * PARTS + part;
      const auto* from = in(row < rows ? row : rows - 1);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int k = e * WIDTH * V + me;
        if (WHOLE || k < K) ark_hold_past(ahead[r][e], from + k);
      }
    }
  };
  int first = rounds.first, next = first + rounds.step, parity = 0;
  if (team >= TEAMS) return;
  if (first < rows) load(first);
  typedef ArkScales<V, E, Weight> Scales;
  Scales scales = {};
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int k = e * WIDTH * V + me;
    if (first < rows && (WHOLE || k < K)) Scales::ask(scales, weight, e, k);
  }
  while (first < rows) {
    Rounds::ask(rounds);
    float v[R][E * V], centre[R], total[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      centre[r] = OP::First::none(0.0f);
      total[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const auto pack = ark_unpacked(ahead[r][e]);
#pragma unroll
        for (int j = 0; j < V; ++j) v[r][e * V + j] = ark_get(pack.v, j);
      }
    }
    if (next < rows) load(next);
    if (OP::FIRST) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < E * V; ++i) {
          if (WHOLE || i / V * WIDTH * V + me < K) centre[r] = OP::First::join(centre[r], v[r][i]);
        }
      }
      ark_fold<typename OP::First, TEAM, PART>(centre, sums, parity);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      centre[r] = OP::centre(centre[r], K);
#pragma unroll
      for (int i = 0; i < E * V; ++i) {
        if (WHOLE || i / V * WIDTH * V + me < K) total[r] += OP::term(v[r][i], centre[r]);
      }
    }
    Rounds::tell(rounds);
    ark_fold<ArkAddFold, TEAM, PART>(total, sums, parity);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first + r * PARTS + part >= rows) break;
      const float factor = OP::factor(total[r], K, eps);
      auto* to = out(first + r * PARTS + part);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int k = e * WIDTH * V + me;
        if (!WHOLE && k >= K) continue;
        decltype(ark_load_pack<V>(to)) pack;
        float by[V], plus[V] = {};
        Scales::take(scales, by, plus, weight, e, k);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float made = OP::value(v[r][e * V + j], factor) * by[j];
          ark_put(pack.v, j, ark_biased(made, weight, plus[j]));
        }
        ark_store_pack<V>(to + k, pack);
      }
    }
    first = next;
    next = Rounds::told(rounds, next);
  }
}

// Computes OP (softmax or a norm) of rows of any length and alignment, one row after the other, by
// the whole block. KEEP: true if a row's values are kept in shared memory (K floats); otherwise
// they are read several times. A thread adds V neighbouring elements in separate sums.
template <class OP, int V, bool KEEP, int K, class In, class Out, class Weight>
ARK_DEVICE void ark_row_norm_any(const In& in, const Out& out, Weight weight, int rows, float eps,
                                 char* red, float* row) {
  float* sums = reinterpret_cast<float*>(red);
  constexpr int bulk = K / V * V;
  int parity = 0;
  for (int r = 0; r < rows; ++r) {
    const auto* source = in(r);
    auto* target = out(r);
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
      float plus[1] = {};
      ark_biases(plus, weight, k);
      return ark_biased(OP::value(v, factor) * ark_weight(weight, k), weight, plus[0]);
    };
    for (int k = ark_tid() * V; k < bulk; k += ARK_THREADS * V) {
      ARK_VECTOR_LOOP
      for (int j = 0; j < V; ++j) ark_put(target, k + j, value(k + j));
    }
    for (int k = bulk + ark_tid(); k < K; k += ARK_THREADS) ark_put(target, k, value(k));
  }
}

// Computes OP (softmax or a norm) of the rows of a task: ROWS of the COUNT rows, from coord[2] on.
// K: elements of a row. If V > 0, rows are kept in registers, in packs of V elements: TEAM warps,
// or PART lanes, process R rows at a time, with E packs of a row per thread (ark_row_norm_held). If
// V is 0, the block processes one row at a time, with SIDE sums per thread (ark_row_norm_any).
// FOLDS: bytes of shared memory for sums, which precede a row that is kept in shared memory.
template <class OP, int ROWS, int COUNT, int K, int SIDE, bool KEEP, int FOLDS, int V, int E, int R,
          int TEAM, int PART, class In, class Out, class Weight>
ARK_DEVICE void ark_row_norm(ArkCtx& c, const ArkTask& t, const In& in, const Out& out,
                             Weight weight, float eps, ark_u64 addresses) {
  const int rows = ROWS == COUNT || t.coord[2] + ROWS < COUNT ? ROWS : COUNT - t.coord[2];
  char* red = ARK_SCRATCH(c);
  if constexpr (V > 0) {
    if (V == 1 || ark_aligned(addresses)) {
      constexpr int TEAMS = ARK_WARPS / TEAM, AT_ONCE = R * (ARK_LANES / PART);
      const ArkRounds rounds{TEAMS == 1 ? 0 : ark_warp() / TEAM * AT_ONCE, TEAMS * AT_ONCE};
      ark_row_norm_held<OP, K, V, E, R, TEAM, PART>(in, out, weight, rows, eps, red, rounds);
      return;
    }
  }
  if constexpr (V != 1) {
    float* row = reinterpret_cast<float*>(red + FOLDS);
    ark_row_norm_any<OP, SIDE, KEEP, K>(in, out, weight, rows, eps, red, row);
  }
}
