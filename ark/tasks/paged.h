// Attention over caches of keys and values in pages of a pool that sequences share. paged.py
// describes operands and tasks.

// Like ark_attention (attention.h), for caches in pages. Task coordinates: row, key/value head,
// split (part of the positions). MOST: the largest number of pages of a sequence. All positions
// that the row can see must be in pages of the pool.
template <int G, int KV_HEADS, int D, int PAGE, int POOL, int MOST, int SPLITS, int CHUNK, class Q,
          class K, class V, class T, class P, class O, class F>
ARK_DEVICE void ark_paged_attention(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys,
                                    V values, T pages, P position, O output, F fresh) {
  constexpr int ROOM = PAGE * MOST;
  const int at = position.p[0], seen = (at < ROOM ? at : ROOM) + t.coord[0] + 1;
  const auto paged = ark_paged<PAGE, POOL>(keys, pages);
  ark_check_pages<ROOM>(c, paged, position, 0, seen < ROOM ? seen : ROOM);
  ark_attention<G, KV_HEADS, 1, D, PAGE * MOST, SPLITS, CHUNK, 0>(
      c, t, scale, query, paged, ark_paged<PAGE, POOL>(values, pages), position, output, fresh);
}

// Appends rows to a cache in pages. Task coordinates: head. Either row r belongs to sequence r, or
// all rows belong to one sequence, at consecutive positions. A position outside of the table ends
// the launch with an error. Rows after the table's end are dropped.
template <int ROWS, int SEQUENCES, int D, int PAGE, int POOL, int MOST, class X, class T, class P,
          class C>
ARK_DEVICE void ark_paged_append(ArkCtx& c, const ArkTask& t, X x, T pages, P position, C cache) {
  const int head = t.coord[0];
  for (int e = ark_tid(); e < ROWS * D; e += ARK_THREADS) {
    const int r = e / D, d = e % D, of = SEQUENCES > 1 ? r : 0;
    const int first = position.p[of], row = SEQUENCES > 1 ? 0 : r;
    if (first < 0 || first >= PAGE * MOST) {
      ark_looked_up<false>(c, first, PAGE * MOST);
      continue;
    }
    const int at = first + row;
    if (at >= PAGE * MOST) continue;
    const int page = pages.p[of * MOST + at / PAGE];
    if (page < 0 || page >= POOL) continue;
    const float v = ark_get(ark_address(x, 0, 0, r, head * D + d), 0);
    ark_put(ark_address(cache, page, head, at % PAGE, d), 0, v);
  }
}
