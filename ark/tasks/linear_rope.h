// The epilogue of linear layers that rotates queries and keys and appends keys and values to the
// caches (linear_epilogue.h, rotary.h).

template <class R>
struct ArkRopeSums {
  static constexpr int WIDTH = 2;
  static constexpr bool WAITS = false;
  R rope;
};
template <class R>
ARK_DEVICE ArkRopeSums<R> ark_rope_sums(R rope) {
  return {rope};
}

template <class T, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const ArkRopeSums<T>& e, int first, int n, int rows,
                               float (&ahead)[M][R]) {
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; r += 2) {
      if (r >= rows || n + r >= T::ROTATED) continue;
      const float angle = ark_rope_angle(e.rope, first + m, n + r);
      ahead[m][r] = ark_sin(angle);
      ahead[m][r + 1] = ark_cos(angle);
    }
  }
}

template <class T, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkRopeSums<T>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&ahead)[R]) {
  for (int r = 0; r < R; r += 2) {
    if (r >= rows) continue;
    float a = sum[r], b = sum[r + 1];
    if (n + r < T::ROTATED) ark_rotate(a, b, ahead[r], ahead[r + 1]);
    ark_rope_store(c, e.rope, m, n + r, a, b);
  }
}
