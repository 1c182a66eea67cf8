// Reductions over one dimension. A reduction over the last dimension reduces rows, whose elements
// are contiguous. A reduction over another dimension reduces columns.

// The terms (the values to reduce) of a reduction that computes them from the elements of one or
// two tensors, and from M numbers that all elements of a row or column share. An object of this
// type is used like a pointer to the first term. a, b: addresses of the elements. m: the numbers of
// a row, or of W neighbouring columns. fill(m, column) loads the numbers of a column; make(a, b, m,
// at) computes a term of type R. at: the element's index in its row or column.
template <typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
struct ArkTerms {
  const A* a;
  const B* b;
  Fill fill;
  Make make;
  ark_i64 at;
  float m[W][M];
};
template <typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkTerms<R, TWO, M, W, A, B, Fill, Make> operator+(
    const ArkTerms<R, TWO, M, W, A, B, Fill, Make>& s, ark_i64 k) {
  ArkTerms<R, TWO, M, W, A, B, Fill, Make> moved = s;
  moved.a += k;
  moved.at += k;
  if (TWO) moved.b += k;
  return moved;
}
// The value to reduce at index k: an element of a tensor, or a number that is computed from
// elements.
template <typename T>
ARK_DEVICE auto ark_term(const T* p, ark_i64 k) {
  return ark_plain(p[k]);
}
template <typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE R ark_term(const ArkTerms<R, TWO, M, W, A, B, Fill, Make>& s, ark_i64 k) {
  return s.make(ark_plain(s.a[k]), ark_plain(s.b[TWO ? k : 0]), s.m[0], s.at + k);
}
// The loaded elements from which N terms (values to reduce) are computed. Their loads may still be
// in flight.
template <int N, bool TWO, typename A, typename B>
struct ArkHeldTerms {
  ArkHeld<const A, N> a;
  ArkHeld<const B, TWO ? N : 1> b;
};
template <typename R, bool TWO, int M, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkTerms<R, TWO, M, 1, A, B, Fill, Make> ark_terms(const A* a, const B* b, Fill fill,
                                                              Make make) {
  ArkTerms<R, TWO, M, 1, A, B, Fill, Make> made{a, b, fill, make, 0, {}};
  fill(made.m[0], 0);
  return made;
}
// The address of the values to reduce in N neighbouring columns, from column number `column` on.
template <int N, typename T>
ARK_DEVICE const T* ark_columns(const T* p, int column) {
  return p + column;
}
template <int N, typename R, bool TWO, int M, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkTerms<R, TWO, M, N, A, B, Fill, Make> ark_columns(
    const ArkTerms<R, TWO, M, 1, A, B, Fill, Make>& s, int column) {
  ArkTerms<R, TWO, M, N, A, B, Fill, Make> made{
      s.a + column, TWO ? s.b + column : s.b, s.fill, s.make, 0, {}};
#pragma unroll
  for (int j = 0; j < N; ++j) s.fill(made.m[j], column + j);
  return made;
}
template <int N, typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkHeldTerms<N, TWO, A, B> ark_held(const ArkTerms<R, TWO, M, W, A, B, Fill, Make>&) {
  return {};
}
template <int N, typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE void ark_hold(ArkHeldTerms<N, TWO, A, B>& to,
                         const ArkTerms<R, TWO, M, W, A, B, Fill, Make>& s) {
  ark_hold(to.a, s.a);
  if constexpr (TWO) ark_hold(to.b, s.b);
}
// Computes the values to reduce from elements of `source` that were loaded before into `held`.
template <int N, class Source, class Held>
ARK_DEVICE auto ark_values(const Source&, const Held& held) {
  return ark_unpacked(held);
}
template <int N, typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkPack<R, N> ark_values(const ArkTerms<R, TWO, M, W, A, B, Fill, Make>& source,
                                    const ArkHeldTerms<N, TWO, A, B>& held) {
  const auto x = ark_unpacked(held.a);
  const auto y = ark_unpacked(held.b);
  ArkPack<R, N> made;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    made.v[j] = source.make(ark_plain(x.v[j]), ark_plain(y.v[TWO ? j : 0]),
                            source.m[W == 1 ? 0 : j], source.at + (W == 1 ? j : 0));
  }
  return made;
}
template <int N, typename R, bool TWO, int M, int W, typename A, typename B, class Fill, class Make>
ARK_DEVICE ArkPack<R, N> ark_load_pack(const ArkTerms<R, TWO, M, W, A, B, Fill, Make>& source) {
  ArkHeldTerms<N, TWO, A, B> held{};
  ark_hold(held, source);
  return ark_values<N>(source, held);
}

// Reduces each of `rows` rows of K contiguous elements to one number. A team of TEAM warps reduces
// a row. A thread adds U packs of V neighbouring elements while it loads the next U packs. in(row):
// the address of a row. finish(row, total): stores the row's result.
template <class F, typename T, int K, int V, int U, int TEAM, class In, class Finish>
ARK_DEVICE void ark_reduce_rows(int rows, char* red, const In& in, const Finish& finish) {
  constexpr int WIDTH = TEAM * ARK_LANES, AT_ONCE = U * WIDTH * V, step = ARK_WARPS / TEAM;
  // From the casts to unsigned the compiler sees that 0 <= me < WIDTH. It then unrolls loops of few
  // rounds, and omits the loop over single elements if there are none.
  const int team = step == 1 ? 0 : ark_warp() / TEAM;
  const int me = static_cast<int>(static_cast<ark_u32>(ark_tid()) % WIDTH);
  constexpr int bulk = K / V * V;
  decltype(ark_held<V>(in(0))) ahead[U] = {};
  const auto inside = [](int k) { return K % AT_ONCE == 0 || k < bulk; };
  const auto load = [&](int r, int k) {
    const auto source = in(r);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (inside(k + u * WIDTH * V)) ark_hold(ahead[u], source + (k + u * WIDTH * V));
    }
  };
  int parity = 0, r = team;
  if (ARK_WARPS % TEAM != 0 && team >= step) return;
  if (r < rows) load(r, me * V);
  for (; r < rows; r += step) {
    const auto source = in(r);
    T part[V];
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = F::none(T());
    for (int k = me * V; k < bulk; k += AT_ONCE) {
      T value[U][V] = {};
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (!inside(k + u * WIDTH * V)) continue;
        const auto pack = ark_values<V>(source + (k + u * WIDTH * V), ahead[u]);
#pragma unroll
        for (int j = 0; j < V; ++j) value[u][j] = ArkTotal<T>::of(ark_plain(pack.v[j]));
      }
      if (k + AT_ONCE < bulk) {
        load(r, k + AT_ONCE);
      } else if (r + step < rows) {
        load(r + step, me * V);
      }
      ark_join_packs<F>(part, value, [&](int u) { return inside(k + u * WIDTH * V); });
    }
    for (int k = bulk + me; k < K; k += WIDTH)
      part[0] = F::join(part[0], ArkTotal<T>::of(ark_term(source, k)));
    T total[1] = {part[0]};
#pragma unroll
    for (int j = 1; j < V; ++j) total[0] = F::join(total[0], part[j]);
    ark_fold<F, TEAM>(total, reinterpret_cast<T*>(red), parity);
    if (me == 0) finish(r, total[0]);
  }
}

// Like ark_reduce_rows, for short rows: PART lanes of a warp reduce a row, and each lane loads E
// packs of the row. A lane loads U rows before it adds the first.
template <class F, typename T, int K, int V, int PART, int E, int U, class In, class Finish>
ARK_DEVICE void ark_reduce_short(int rows, const In& in, const Finish& finish) {
  constexpr int PARTS = ARK_LANES / PART, AT_ONCE = PARTS * U;
  const int part = ark_lane() / PART, k = ark_lane() % PART * V;
  const auto source = [&](int row) { return in(row < rows ? row : rows - 1) + k; };
  const auto inside = [&](int e) { return K == E * PART * V || e * PART * V + k < K; };
  for (int first = ark_warp() * AT_ONCE; first < rows; first += ARK_WARPS * AT_ONCE) {
    decltype(ark_held<V>(in(0))) held[U][E] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const auto from = source(first + u * PARTS + part);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (inside(e)) ark_hold(held[u][e], from + e * PART * V);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int row = first + u * PARTS + part;
      const auto from = source(row);
      T total = F::none(T());
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (!inside(e)) continue;
        const auto pack = ark_values<V>(from + e * PART * V, held[u][e]);
#pragma unroll
        for (int j = 0; j < V; ++j) total = F::join(total, ArkTotal<T>::of(ark_plain(pack.v[j])));
      }
      total = ark_warp_fold<F, PART>(total);
      if (k == 0 && row < rows) finish(row, total);
    }
  }
}

// ark_reduce_rows by one thread. It keeps SIDE partial sums of a row, which the compiler
// vectorises, and adds them pairwise at the end of the row.
template <class F, typename T, int K, int SIDE, class In, class Finish>
ARK_DEVICE void ark_reduce_rows_alone(int rows, const In& in, const Finish& finish) {
  for (int r = 0; r < rows; ++r) {
    const auto source = in(r);
    T part[SIDE];
    for (int j = 0; j < SIDE; ++j) part[j] = F::none(T());
    int k = 0;
    for (; k + SIDE <= K; k += SIDE) {
      ARK_VECTOR_LOOP
      for (int j = 0; j < SIDE; ++j)
        part[j] = F::join(part[j], ArkTotal<T>::of(ark_term(source, k + j)));
    }
    for (; k < K; ++k)
      part[k % SIDE] = F::join(part[k % SIDE], ArkTotal<T>::of(ark_term(source, k)));
    for (int half = SIDE / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) part[j] = F::join(part[j], part[j + half]);
    }
    finish(r, part[0]);
  }
}

// ark_reduce_rows_alone for sums of exponentials. A row is processed in parts of PART elements: the
// largest elements of a part are found before its exponentials are added, and both loops are
// vectorised.
template <class F, int K, int SIDE, class In, class Finish>
ARK_DEVICE void ark_sum_exps_alone(int rows, const In& in, const Finish& finish) {
  constexpr int PART = 16 * SIDE, bulk = K / SIDE * SIDE;
  for (int r = 0; r < rows; ++r) {
    const auto source = in(r);
    float most[SIDE], from[SIDE], sum[SIDE];
    for (int j = 0; j < SIDE; ++j) {
      most[j] = -ark_inf();
      sum[j] = 0.0f;
    }
    for (int first = 0; first < bulk; first += PART) {
      const int end = first + PART < bulk ? first + PART : bulk;
      float old[SIDE];
      for (int j = 0; j < SIDE; ++j) old[j] = most[j];
      for (int k = first; k < end; k += SIDE) {
        ARK_VECTOR_LOOP
        for (int j = 0; j < SIDE; ++j) {
          const float v = static_cast<float>(ark_term(source, k + j));
          most[j] = v > most[j] ? v : most[j];
        }
      }
      ARK_VECTOR_LOOP
      for (int j = 0; j < SIDE; ++j) {
        from[j] = most[j] == -ark_inf() ? 0.0f : most[j];
        sum[j] *= ark_exp(old[j] - from[j]);
      }
      for (int k = first; k < end; k += SIDE) {
        ARK_VECTOR_LOOP
        for (int j = 0; j < SIDE; ++j) {
          sum[j] += ark_exp(static_cast<float>(ark_term(source, k + j)) - from[j]);
        }
      }
    }
    ArkExpSum total = F::none(ArkExpSum());
    for (int j = 0; j < SIDE; ++j) total = F::join(total, ArkExpSum{most[j], sum[j]});
    for (int k = bulk; k < K; ++k) {
      total = F::join(total, ArkTotal<ArkExpSum>::of(ark_term(source, k)));
    }
    finish(r, total);
  }
}

// Reduces each of `columns` neighbouring columns to one number. A column has K elements, which are
// `stride` elements apart. A group of ACROSS threads covers all columns, V neighbouring columns per
// thread. The block has several such groups, and each group reduces another part of the K elements.
// Groups of one warp first combine their parts by exchanges between lanes.
template <class F, typename T, int V, int U, int ACROSS, class In, class Finish>
ARK_DEVICE void ark_reduce_columns(const In& in, ark_i64 stride, int columns, int K, char* red,
                                   const Finish& finish) {
  constexpr int DEEP = ARK_THREADS / ACROSS;
  const int column = ark_tid() % ACROSS * V, deep = ark_tid() / ACROSS;
  const bool mine = column < columns && deep < DEEP;
  T part[V];
#pragma unroll
  for (int j = 0; j < V; ++j) part[j] = F::none(T());
  if (mine) {
    const auto source = ark_columns<V>(in, column);
    decltype(ark_held<V>(source)) ahead[U] = {};
    const auto inside = [&](int k) { return K % (U * DEEP) == 0 || k < K; };
    const auto load = [&](int k) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (inside(k + u * DEEP)) ark_hold(ahead[u], source + (k + u * DEEP) * stride);
      }
    };
    load(deep);
    for (int k = deep; k < K; k += U * DEEP) {
      // The elements are kept in registers as they were loaded, and converted only when they are
      // used, because converted terms take more registers.
      decltype(ark_held<V>(source)) held[U];
#pragma unroll
      for (int u = 0; u < U; ++u) held[u] = ahead[u];
      if (k + U * DEEP < K) load(k + U * DEEP);
      if constexpr (ark_is_moments<T>) {
        T value[U][V] = {};
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const auto pack = ark_values<V>(source + (k + u * DEEP) * stride, held[u]);
#pragma unroll
          for (int j = 0; j < V; ++j) value[u][j] = ArkTotal<T>::of(ark_plain(pack.v[j]));
        }
        ark_join_packs<F>(part, value, [&](int u) { return inside(k + u * DEEP); });
      } else {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (!inside(k + u * DEEP)) continue;
          const auto pack = ark_values<V>(source + (k + u * DEEP) * stride, held[u]);
#pragma unroll
          for (int j = 0; j < V; ++j)
            part[j] = F::join(part[j], ArkTotal<T>::of(ark_plain(pack.v[j])));
        }
      }
    }
  }
  constexpr bool SEVERAL = ACROSS < ARK_LANES;
  constexpr int PARTS = SEVERAL ? ARK_WARPS : DEEP;
#pragma unroll
  for (int mask = ARK_LANES / 2; SEVERAL && mask >= ACROSS; mask /= 2) {
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = F::join(part[j], ark_shfl_bits(part[j], mask));
  }
  T* sums = reinterpret_cast<T*>(red);
  ark_sync();
  if (mine && (!SEVERAL || ark_lane() < ACROSS)) {
    T* to = sums + (SEVERAL ? ark_warp() : deep) * ACROSS * V + column;
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = part[j];
  }
  ark_sync();
  for (int c = ark_tid(); c < columns; c += ARK_THREADS) {
    T total = sums[c];
    for (int d = 1; d < PARTS; ++d) total = F::join(total, sums[d * ACROSS * V + c]);
    finish(c, total);
  }
}

// Like ark_reduce_columns, for all columns of a tile, if columns have few elements: each thread
// reduces V neighbouring columns alone, so that no thread waits for others. in, out and finish: as
// for ark_reduce_across.
template <class F, typename T, class TILE, int K, ark_i64 STRIDE, int V, int U, class In, class Out,
          class Finish>
ARK_DEVICE void ark_reduce_packs(const ArkTask& t, const In& in, const Out& out,
                                 const Finish& finish) {
  constexpr int packs = TILE::tile[0] * TILE::tile[1] * TILE::tile[2] * (TILE::tile[3] / V);
  for (int r = ark_tid(); r < packs; r += ARK_THREADS) {
    int i0, i1, i2, i3;
    if (!ark_tile_place<TILE, V>(t.coord, r, i0, i1, i2, i3)) continue;
    const auto from = ark_columns<V>(in(i0, i1, i2, i3), 0);
    T part[V];
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = F::none(T());
    const auto join = [&](const auto& pack) {
#pragma unroll
      for (int j = 0; j < V; ++j) part[j] = F::join(part[j], ArkTotal<T>::of(ark_plain(pack.v[j])));
    };
    constexpr int bulk = K / U * U, rest = K - bulk;
    decltype(ark_load_pack<V>(from)) some[U];
    for (int k = 0; k < bulk; k += U) {
#pragma unroll
      for (int u = 0; u < U; ++u) some[u] = ark_load_pack<V>(from + (k + u) * STRIDE);
#pragma unroll
      for (int u = 0; u < U; ++u) join(some[u]);
    }
#pragma unroll
    for (int u = 0; u < rest; ++u) some[u] = ark_load_pack<V>(from + (bulk + u) * STRIDE);
#pragma unroll
    for (int u = 0; u < rest; ++u) join(some[u]);
    auto* to = out(i0, i1, i2, i3);
#pragma unroll
    for (int j = 0; j < V; ++j) finish(to, j, part[j]);
  }
}

// Like ark_reduce_columns, for blocks of one thread: adds row after row to the sums of the columns.
template <class F, typename T, class In, class Finish>
ARK_DEVICE void ark_reduce_columns_alone(const In& in, ark_i64 stride, int columns, int K,
                                         char* red, const Finish& finish) {
  T* sums = reinterpret_cast<T*>(red);
  for (int c = 0; c < columns; ++c) sums[c] = F::none(T());
  for (int k = 0; k < K; ++k) {
    ARK_VECTOR_LOOP
    for (int c = 0; c < columns; ++c) {
      sums[c] = F::join(sums[c], ArkTotal<T>::of(ark_term(ark_columns<1>(in, c), k * stride)));
    }
  }
  for (int c = 0; c < columns; ++c) finish(c, sums[c]);
}

// Reduces each row of a task's tile to one number. A row has K elements, which are contiguous in
// memory. in(i0, i1, i2): the address of a row. finish(i0, i1, i2, total): stores a row's result.
//
// If PART is 0, TEAM warps reduce a row. A thread loads U packs of V neighbouring elements at a
// time, or UN packs of NARROW elements if the memory is not aligned for packs of V. If PART is not
// 0, rows are short: PART lanes of one warp reduce a row, each lane loads E packs of V elements,
// and loads R rows at a time. Short rows that are not aligned are reduced by TEAM warps.
template <class F, typename T, class TILE, int K, int V, int NARROW, int U, int UN, int TEAM,
          int PART, int E, int R, class In, class Finish>
ARK_DEVICE void ark_reduce_last(ArkCtx& c, const ArkTask& t, const In& in, const Finish& finish,
                                ark_u64 address) {
  const int b0 = t.coord[0], b1 = t.coord[1], b2 = t.coord[2];
  const int n0 = ark_tile_end<TILE, 0>(t.coord) - b0, n1 = ark_tile_end<TILE, 1>(t.coord) - b1;
  const int n2 = ark_tile_end<TILE, 2>(t.coord) - b2;
  constexpr bool FLAT = TILE::tile[0] == 1 && TILE::tile[1] == 1;  // no divisions
  const auto at = [&](int r, const auto& body) {
    return FLAT ? body(b0, b1, b2 + r) : body(b0 + r / n2 / n1, b1 + r / n2 % n1, b2 + r % n2);
  };
  const auto row = [&](int r) { return at(r, in); };
  const auto store = [&](int r, T v) {
    at(r, [&](int i0, int i1, int i2) { finish(i0, i1, i2, v); });
  };
  const int rows = FLAT ? n2 : n0 * n1 * n2;
  if constexpr (ARK_THREADS == 1 && ark_is_exp_sum<T>) {
    ark_sum_exps_alone<F, K, V>(rows, row, store);
  } else if constexpr (ARK_THREADS == 1) {
    ark_reduce_rows_alone<F, T, K, V>(rows, row, store);
  } else if (PART > 0 && (V == 1 || ark_aligned(address))) {
    ark_reduce_short < F, T, K, V, PART<1 ? 1 : PART, E, R>(rows, row, store);
  } else if (V == NARROW || ark_aligned(address)) {
    ark_reduce_rows<F, T, K, V, U, TEAM>(rows, ARK_SCRATCH(c), row, store);
  } else if constexpr (V != NARROW) {
    ark_reduce_rows<F, T, K, NARROW, UN, TEAM>(rows, ARK_SCRATCH(c), row, store);
  }
}

// Reduces each column of a task's tile to one number, in blocks of neighbouring columns. A column
// has K elements, which are STRIDE elements apart. in(i0, i1, i2, i3): the address of the first
// element of the column at these indices of the result. out(i0, i1, i2, i3): the address of its
// result. finish(to, k, total): stores the result of column k of a block whose first result is at
// `to`. ALONE: true if each thread reduces columns alone (ark_reduce_packs).
template <class F, typename T, class TILE, int K, ark_i64 STRIDE, int V, int U, int ACROSS,
          int NARROW, bool ALONE, class In, class Out, class Finish>
ARK_DEVICE void ark_reduce_across(ArkCtx& c, const ArkTask& t, const In& in, const Out& out,
                                  const Finish& finish, ark_u64 address) {
  if constexpr (ALONE) {
    if (V == 1 || ark_aligned(address)) {
      ark_reduce_packs<F, T, TILE, K, STRIDE, V, U>(t, in, out, finish);
    } else if constexpr (V > 1) {
      ark_reduce_packs<F, T, TILE, K, STRIDE, 1, U>(t, in, out, finish);
    }
    return;
  }
  constexpr int tile = TILE::tile[3], block = ARK_THREADS == 1 ? tile : ACROSS * V;
  const int e0 = ark_tile_end<TILE, 0>(t.coord), e1 = ark_tile_end<TILE, 1>(t.coord);
  const int e2 = ark_tile_end<TILE, 2>(t.coord), e3 = ark_tile_end<TILE, 3>(t.coord);
  for (int i0 = t.coord[0]; i0 < e0; ++i0) {
    for (int i1 = t.coord[1]; i1 < e1; ++i1) {
      for (int i2 = t.coord[2]; i2 < e2; ++i2) {
        for (int i3 = t.coord[3]; i3 < e3; i3 += block) {
          const int columns = e3 - i3 < block ? e3 - i3 : block;
          const auto from = in(i0, i1, i2, i3);
          auto* to = out(i0, i1, i2, i3);
          const auto store = [&](int k, T v) { finish(to, k, v); };
          char* red = ARK_SCRATCH(c);
          if constexpr (ARK_THREADS == 1) {
            ark_reduce_columns_alone<F, T>(from, STRIDE, columns, K, red, store);
          } else if (V == 1 || ark_aligned(address)) {
            ark_reduce_columns<F, T, V, U, ACROSS>(from, STRIDE, columns, K, red, store);
          } else if constexpr (V > 1) {
            ark_reduce_columns<F, T, 1, U, NARROW>(from, STRIDE, columns, K, red, store);
          }
        }
      }
    }
  }
}
