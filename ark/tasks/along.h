// What one thread does along a line of a tensor.

// The running joins of N elements from `start` on: store(k, total) with element k, or before it.
template <int N, bool REVERSE, bool EXCLUSIVE, typename T, class Load, class Join, class Store>
ARK_DEVICE void ark_scan_line(T start, const Load& load, const Join& join, const Store& store) {
  T total = start;
  for (int n = 0; n < N; ++n) {
    const int k = REVERSE ? N - 1 - n : n;
    const T x = load(k);
    if (EXCLUSIVE) store(k, total);
    total = join(total, x);
    if (!EXCLUSIVE) store(k, total);
  }
}

// body(n, k) for N updates in order, of which the n-th is for place k = id(n) of SIZE.
template <int N, int SIZE, class Id, class Body>
ARK_DEVICE void ark_each_update(ArkCtx& c, const Id& id, const Body& body) {
  for (int n = 0; n < N; ++n) body(n, ark_looked_up(c, id(n), SIZE));
}

// body(x) for each of SIZE places of a window, DILATION apart, that lies in the N elements; the
// window of result i begins BEFORE elements before element i * STRIDE.
template <int SIZE, int STRIDE, int DILATION, int BEFORE, int N, class Body>
ARK_DEVICE void ark_each_in_window(int i, const Body& body) {
  for (int w = 0; w < SIZE; ++w) {
    const int x = i * STRIDE - BEFORE + w * DILATION;
    if (x >= 0 && x < N) body(x);
  }
}
