// The destination to which a projection stores keys or values of several sequences. They are stored
// in pages (blocks of PAGE positions) of a pool. The heads from number s * HEADS on belong to
// sequence s.
//
// Row s of the page table has the page numbers of sequence s, at most MOST. Position p of the
// sequence is row p % PAGE of its page number p / PAGE. A page number outside of the pool is
// replaced by 0, which keeps the access in bounds. The attention task reads the same row of the
// table and ends the launch with an error in this case.
template <int HEADS, int PAGE, int POOL, int MOST, class X, class T>
struct ArkAppendedPages {
  X pool;
  T pages;
};
template <int HEADS, int PAGE, int POOL, int MOST, class X, class T>
ARK_DEVICE ArkAppendedPages<HEADS, PAGE, POOL, MOST, X, T> ark_appended_pages(X pool, T pages) {
  return {pool, pages};
}
template <int HEADS, int PAGE, int POOL, int MOST, class X, class T>
ARK_DEVICE auto ark_address(const ArkAppendedPages<HEADS, PAGE, POOL, MOST, X, T>& x, int, int head,
                            int place, int d) {
  const int page = x.pages.p[head / HEADS * MOST + place / PAGE];
  return ark_address(x.pool, page >= 0 && page < POOL ? page : 0, head % HEADS, place % PAGE, d);
}
