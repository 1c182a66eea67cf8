// Quantised key/value caches. The D elements of one head at one position are a row, stored as D
// codes and one scale (ArkRow). A warp writes a whole row at a time. cache_rows.py lists the types
// of caches.

template <class C>
constexpr float ARK_LARGEST_CODE = 127.0f;
template <>
inline constexpr float ARK_LARGEST_CODE<ark_e4m3> = 448.0f;
ARK_DEVICE void ark_put_code(signed char* codes, int d, float v) {
  codes[d] = static_cast<signed char>(static_cast<ark_i32>(ark_round(v)));
}
ARK_DEVICE void ark_put_code(ark_e4m3* codes, int d, float v) { codes[d] = ark_to_e4m3(v); }

// Element d of a row.
template <class C, int K, class S>
ARK_DEVICE float ark_get(const ArkRow<C, K, K, S, false>* row, ark_i64 d) {
  return ark_code(static_cast<const C*>(nullptr), row->bytes[d], 0) * ark_row_scale(*row, 0);
}

// This lane's part of the dot product of a quantised row with the vector x.
template <class C, int K, class S>
ARK_DEVICE float ark_row_dot(const ArkRow<C, K, K, S, false>* row, const float* x, int) {
  float sum[1];
  ark_row_products<1, K>(*row, x, sum);
  return sum[0];
}

// Called by a warp: stores a row. value(d): element d. The element of largest magnitude gets the
// largest code. A row with an element that is not finite becomes NaN in all elements. This is
// tested by the bits, because a compiler that may reassociate sums replaces v - v by 0.
template <class C, int K, class S, class Value>
ARK_DEVICE void ark_store_row(ArkRow<C, K, K, S, false>* row, const Value& value) {
  typedef ArkRow<C, K, K, S, false> Row;
  float most = 1e-30f, not_finite = 0.0f;
  for (int d = ark_lane(); d < K; d += ARK_LANES) {
    const float v = value(d), size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    if ((ark_float_bits(v) & 0x7f800000u) == 0x7f800000u) not_finite = 1.0f;
  }
  most = ark_warp_max(most);
  const bool finite = ark_warp_max(not_finite) == 0.0f;
  const float factor = ARK_LARGEST_CODE<C> / most;
  C* codes = reinterpret_cast<C*>(row->bytes);
  for (int d = ark_lane(); d < K; d += ARK_LANES) {
    ark_put_code(codes, d, finite ? value(d) * factor : 1.0f);
  }
  if (ark_lane() == 0) {
    ark_put(reinterpret_cast<S*>(row->bytes + Row::SCALES_AT), 0,
            finite ? most / ARK_LARGEST_CODE<C> : ark_bits_float(0x7fc00000u));
  }
}

// The variant of ark_kv_append (kv_append.h) for a quantised cache. Task coordinates: head.
template <int ROWS, int WIDTH, int CONTEXT, class X, class P, class C>
ARK_DEVICE void ark_kv_append_rows(ArkCtx&, const ArkTask& t, X x, P position, C cache) {
  const int head = t.coord[0];
  for (int r = ark_warp(); r < ROWS; r += ARK_WARPS) {
    const int at = position.p[0] + r;
    if (at < 0 || at >= CONTEXT) continue;
    ark_store_row(ark_address(cache, 0, head, at, 0), [&](int d) -> float {
      return ark_get(ark_address(x, 0, 0, r, head * WIDTH + d), 0);
    });
  }
}

// The variant of ark_paged_append (paged.h) for a quantised cache. Task coordinates: head.
template <int ROWS, int SEQUENCES, int D, int PAGE, int POOL, int MOST, class X, class T, class P,
          class C>
ARK_DEVICE void ark_paged_append_rows(ArkCtx& c, const ArkTask& t, X x, T pages, P position,
                                      C cache) {
  const int head = t.coord[0];
  for (int r = ark_warp(); r < ROWS; r += ARK_WARPS) {
    const int of = SEQUENCES > 1 ? r : 0, first = position.p[of];
    if (first < 0 || first >= PAGE * MOST) {
      if (ark_lane() == 0) ark_looked_up<false>(c, first, PAGE * MOST);
      continue;
    }
    const int at = first + (SEQUENCES > 1 ? 0 : r);
    if (at >= PAGE * MOST) continue;
    const int page = pages.p[of * MOST + at / PAGE];
    if (page < 0 || page >= POOL) continue;
    ark_store_row(ark_address(cache, page, head, at % PAGE, 0), [&](int d) -> float {
      return ark_get(ark_address(x, 0, 0, r, head * D + d), 0);
    });
  }
}
