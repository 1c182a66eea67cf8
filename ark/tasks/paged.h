// Attention over key/value caches in pages of a pool that sequences share. What tasks compute and
// touch is said in paged.py.

// Keys or values of one sequence: position p is row p % PAGE of the page with the number
// pages[p / PAGE], of POOL.
template <int PAGE, int POOL, class X, class T>
struct ArkPaged {
  X pool;
  T pages;
};
// A number that no page has, which ends the run, is read as 0: no table leads out of the pool.
template <int PAGE, int POOL, class X, class T>
ARK_DEVICE auto ark_address(const ArkPaged<PAGE, POOL, X, T>& x, int, int head, int place, int d) {
  const int page = x.pages.p[place / PAGE];
  return ark_address(x.pool, page >= 0 && page < POOL ? page : 0, head, place % PAGE, d);
}

// coord: row, key/value head, split, as of ark_attention; MOST pages of a sequence. What the row
// sees must lie in pages of the pool.
template <int G, int KV_HEADS, int D, int PAGE, int POOL, int MOST, int SPLITS, int CHUNK, class Q,
          class K, class V, class T, class P, class O>
ARK_DEVICE void ark_paged_attention(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys,
                                    V values, T pages, P position, O output) {
  const int seen = position.p[0] + t.coord[0] + 1;
  for (int i = ark_tid(); i < MOST && i * PAGE < seen; i += ARK_THREADS) {
    const int page = pages.p[i];
    if (page < 0 || page >= POOL) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(POOL), static_cast<ark_u32>(page));
    }
  }
  ark_attention<G, KV_HEADS, D, PAGE * MOST, SPLITS, CHUNK>(
      c, t, scale, query, ArkPaged<PAGE, POOL, K, T>{keys, pages},
      ArkPaged<PAGE, POOL, V, T>{values, pages}, position, output, ArkNoOperand{});
}

// coord: head. Row r is of sequence r, or all are of the only one, one position behind the other.
template <int ROWS, int SEQUENCES, int D, int PAGE, int POOL, int MOST, class X, class T, class P,
          class C>
ARK_DEVICE void ark_paged_append(ArkCtx&, const ArkTask& t, X x, T pages, P position, C cache) {
  const int head = t.coord[0];
  for (int e = ark_tid(); e < ROWS * D; e += ARK_THREADS) {
    const int r = e / D, d = e % D, of = SEQUENCES > 1 ? r : 0;
    const int at = position.p[of] + (SEQUENCES > 1 ? 0 : r);
    if (at < 0 || at >= PAGE * MOST) continue;
    const int page = pages.p[of * MOST + at / PAGE];
    if (page < 0 || page >= POOL) continue;
    const float v = ark_get(ark_address(x, 0, 0, r, head * D + d), 0);
    ark_put(ark_address(cache, page, head, at % PAGE, d), 0, v);
  }
}
