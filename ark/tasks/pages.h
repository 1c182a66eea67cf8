// Keys or values of one sequence in pages of a pool that sequences share. Position p is row p %
// PAGE of the page with number pages[p / PAGE]. The pool has POOL pages.
template <int PAGE, int POOL, class X, class T>
struct ArkPaged {
  X pool;
  T pages;
};
template <int PAGE, int POOL, class X, class T>
ARK_DEVICE ArkPaged<PAGE, POOL, X, T> ark_paged(X pool, T pages) {
  return {pool, pages};
}
// The address of an element of a cache in pages. A page number outside of the pool is replaced by
// 0, so that the access stays inside the pool. The separate check ark_check_pages then ends the
// launch with an error.
template <int PAGE, int POOL, class X, class T>
ARK_DEVICE auto ark_address(const ArkPaged<PAGE, POOL, X, T>& x, int, int head, int place, int d) {
  const int page = x.pages.p[place / PAGE];
  return ark_address(x.pool, page >= 0 && page < POOL ? page : 0, head, place % PAGE, d);
}

// Called by all threads. Ends the launch with an error in two cases: the position is beyond the
// ROOM positions that the page table has room for, or one of the positions begin to end - 1 is in a
// page outside of the pool.
template <int ROOM, int PAGE, int POOL, class X, class T, class P>
ARK_DEVICE void ark_check_pages(ArkCtx& c, const ArkPaged<PAGE, POOL, X, T>& x, P position,
                                int begin, int end) {
  if (ark_tid() == 0) ark_looked_up<false>(c, position.p[0], ROOM);
  for (int i = begin / PAGE + ark_tid(); i * PAGE < end; i += ARK_THREADS) {
    const int page = x.pages.p[i];
    if (page < 0 || page >= POOL) {
      ark_fail(c, 5u, 0u, static_cast<ark_u32>(POOL), static_cast<ark_u32>(page));
    }
  }
}
template <int ROOM, class X, class P>
ARK_DEVICE void ark_check_pages(ArkCtx&, const X&, P, int, int) {}
