// Keys or values of several sequences in pages of a pool, as the destination to which a projection
// stores them. The heads from s * HEADS on belong to sequence s. Row s of the page table has the
// numbers of its pages, at most MOST. Position p is row p % PAGE of the page at index p / PAGE of
// that row. A number that is not in the pool is replaced by 0, which keeps the access in bounds;
// the task of attention, which reads the same row of the table, ends the launch with an error.
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
