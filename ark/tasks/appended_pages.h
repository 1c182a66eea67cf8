// Keys or values of sequences in pages of a pool, as a projection stores them: the heads of
// sequence s are numbers s * HEADS and following, and row s of the table has the numbers of its
// pages, MOST of them. Position p is row p % PAGE of the page at p / PAGE. A number outside of the
// pool is read as 0; attention, which sees the position too, ends the run for it.
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
