// Sums over ranks. What a task computes and touches is said in sums.py.

// coord: first element, of N; TILE of them a task. Inputs are added in order.
template <int N, int TILE, class O, class... I>
ARK_DEVICE void ark_sum_ranks(ArkCtx& c, const ArkTask& t, O output, I... inputs) {
  const int end = t.coord[0] + TILE < N ? t.coord[0] + TILE : N;
  for (int i = t.coord[0] + ark_tid(); i < end; i += ARK_THREADS) {
    ark_publish(c, output, 0, 0, 0, i, (... + ark_load(c, inputs, 0, 0, 0, i)));
  }
}
