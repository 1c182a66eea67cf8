// The loops of the task kind `row_fusion`: expressions over the elements of a row, with sums over
// the row between them. row_fusion.py writes the expressions.

// How a row of K elements lies in the registers of its threads: TEAM warps have E packs of V
// elements per thread.
template <int K, int V, int E, int TEAM>
struct ArkRowPart {
  static constexpr int count = E * V, width = TEAM * ARK_LANES, teams = ARK_WARPS / TEAM;
  static constexpr bool whole = K == width * count;
  int team, first;  // the number of the thread's team, and its first element of a row
  // The index in the row of the thread's pack e.
  ARK_DEVICE int at(const ArkRowPart& part, int e) { return e * width * V + part.first; }
  ARK_DEVICE bool inside(const ArkRowPart& part, int e) { return whole || at(part, e) < K; }
  ARK_DEVICE ArkRowPart mine() {
    const int team = teams == 1 ? 0 : ark_warp() / TEAM;
    return {team, (ark_tid() - team * width) * V};
  }
};

// A thread's elements of a row of type T: packs that are being loaded. ark_row_load starts the
// loads; ark_row_take waits for them and converts the elements to float.
template <typename T, int V, int E>
struct ArkRowHeld {
  ArkHeld<T, V> packs[E];
};
template <int K, int V, int E, int TEAM, typename T>
ARK_DEVICE void ark_row_load(const ArkRowPart<K, V, E, TEAM>& part, ArkRowHeld<T, V, E>& to,
                             const T* row) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (part.inside(part, e)) ark_hold(to.packs[e], row + part.at(part, e));
  }
}
template <typename T, int V, int E>
ARK_DEVICE void ark_row_take(float (&to)[E * V], const ArkRowHeld<T, V, E>& from) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const auto pack = ark_unpacked(from.packs[e]);
#pragma unroll
    for (int j = 0; j < V; ++j) to[e * V + j] = ark_get(pack.v, j);
  }
}
template <int K, int V, int E, int TEAM, typename T>
ARK_DEVICE void ark_row_store(const ArkRowPart<K, V, E, TEAM>& part, const float (&from)[E * V],
                              T* row) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (!part.inside(part, e)) continue;
    ArkPack<T, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) ark_put(pack.v, j, from[e * V + j]);
    ark_store_pack<V>(row + part.at(part, e), pack);
  }
}
// Calls body(i) for each element i of the thread that is inside of the row.
template <int K, int V, int E, int TEAM, class Body>
ARK_DEVICE void ark_row_each(const ArkRowPart<K, V, E, TEAM>& part, const Body& body) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (!part.inside(part, e)) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) body(e * V + j);
  }
}

// The sum of term(k) for k from 0 to K - 1 by one thread, which adds 16 neighbours side by side.
template <int K, class Term>
ARK_DEVICE float ark_row_total(const Term& term) {
  constexpr int SIDE = 16, bulk = K / SIDE * SIDE;
  float part[SIDE] = {}, total = 0.0f;
  for (int k = 0; k < bulk; k += SIDE) {
    ARK_VECTOR_LOOP
    for (int j = 0; j < SIDE; ++j) part[j] += term(k + j);
  }
  for (int k = bulk; k < K; ++k) total += term(k);
  for (int j = 0; j < SIDE; ++j) total += part[j];
  return total;
}
