// Softmax and norms of rows that are longer than what the registers of a block hold.

// Computes OP (row_norm.h) of the rows of a task, one row after the other, by the whole block: ROWS
// of the COUNT rows, from coord[2] on. A row has K elements. A thread has packs of V elements of it
// and keeps the first H packs in registers as they were loaded. In each of the three steps of OP it
// loads the others, U at a time.
template <class OP, int ROWS, int COUNT, int K, int V, int H, class In, class Out, class Weight>
ARK_DEVICE void ark_row_norm_long(ArkCtx& c, const ArkTask& t, const In& in, const Out& out,
                                  Weight weight, float eps, ark_u64 addresses) {
  const int rows = ROWS == COUNT || t.coord[2] + ROWS < COUNT ? ROWS : COUNT - t.coord[2];
  char* red = ARK_SCRATCH(c);
  if (!ark_aligned(addresses)) {
    ark_row_norm_any<OP, 1, false, K>(in, out, weight, rows, eps, red, nullptr);
    return;
  }
  constexpr int U = 4;
  constexpr int WIDTH = ARK_THREADS * V;
  constexpr bool WHOLE = K >= H * WIDTH;
  const int me = ark_tid() * V;
  float* sums = reinterpret_cast<float*>(red);
  int parity = 0;
  for (int r = 0; r < rows; ++r) {
    const auto* source = in(r);
    auto* target = out(r);
    decltype(ark_held<V>(source)) kept[H] = {};
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int k = h * WIDTH + me;
      if (WHOLE || k < K) ark_hold_past(kept[h], source + k);
    }
    const auto each = [&](const auto& take) {  // take(pack, its first element's index)
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int k = h * WIDTH + me;
        if (WHOLE || k < K) take(ark_unpacked(kept[h]), k);
      }
      for (int first = H * WIDTH; first < K; first += U * WIDTH) {
        decltype(ark_held<V>(source)) some[U] = {};
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int k = first + u * WIDTH + me;
          if (k < K) ark_hold(some[u], source + k);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int k = first + u * WIDTH + me;
          if (k < K) take(ark_unpacked(some[u]), k);
        }
      }
    };
    float part[V], centre[1] = {0.0f}, total[1];
    if (OP::FIRST) {
#pragma unroll
      for (int j = 0; j < V; ++j) part[j] = OP::First::none(0.0f);
      each([&](const auto& pack, int) {
#pragma unroll
        for (int j = 0; j < V; ++j) part[j] = OP::First::join(part[j], ark_get(pack.v, j));
      });
#pragma unroll
      for (int j = 1; j < V; ++j) part[0] = OP::First::join(part[0], part[j]);
      centre[0] = part[0];
      ark_fold<typename OP::First, ARK_WARPS>(centre, sums, parity);
    }
    const float middle = OP::centre(centre[0], K);
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = 0.0f;
    each([&](const auto& pack, int) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float v = ark_get(pack.v, j);
        part[j] += OP::term(v, middle);
      }
    });
#pragma unroll
    for (int j = 1; j < V; ++j) part[0] += part[j];
    total[0] = part[0];
    ark_fold<ArkAddFold, ARK_WARPS>(total, sums, parity);
    const float factor = OP::factor(total[0], K, eps);
    each([&](const auto& pack, int k) {
      decltype(ark_load_pack<V>(target)) made;
      float by[V], plus[V] = {};
      ark_weights(by, weight, k);
      ark_biases(plus, weight, k);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float v = ark_get(pack.v, j);
        OP::term(v, middle);
        ark_put(made.v, j, ark_biased(OP::value(v, factor) * by[j], weight, plus[j]));
      }
      ark_store_pack<V>(target + k, made);
    });
  }
}
