// Appends rows to a cache of keys or values. kv_append.py describes operands and tasks.

// Copies the ROWS rows of one head of x to consecutive rows of the cache, from `position` on. Rows
// outside of the cache are dropped. Task coordinates: head.
template <int ROWS, int WIDTH, int CONTEXT, class X, class P, class C>
ARK_DEVICE void ark_kv_append(ArkCtx&, const ArkTask& t, X x, P position, C cache) {
  const int head = t.coord[0];
  for (int e = ark_tid(); e < ROWS * WIDTH; e += ARK_THREADS) {
    const int r = e / WIDTH, d = e % WIDTH, at = position.p[0] + r;
    if (at < 0 || at >= CONTEXT) continue;
    const float v = ark_get(ark_address(x, 0, 0, r, head * WIDTH + d), 0);
    ark_put(ark_address(cache, 0, head, at, d), 0, v);
  }
}
