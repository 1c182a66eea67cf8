// Copies of elements that an index tensor selects.

// Copies the packs (vectors of PACK neighbouring elements) of a tile from places that an index
// tensor selects. index(i0, i1, i2, i3): the index for a pack of the result. from(k, i0, i1, i2,
// i3): the address of the pack's source, where k is the index after a check against SIZE. to(i0,
// i1, i2, i3): the address of the result's pack.
//
// A thread copies several packs per round. It first loads all their indices, then checks all of
// them, then loads all packs, so that all loads are in flight at once.
template <class TILE, int PACK, int ROUNDS, bool FROM_END, int SIZE, class Index, class From,
          class To>
ARK_DEVICE void ark_gather_tile(ArkCtx& c, const ark_i32* coord, const Index& index,
                                const From& from, const To& to) {
  ark_each_round<TILE, PACK, ROUNDS>(coord, [&](const auto& round) {
    decltype(index(0, 0, 0, 0)) ids[ROUNDS];
    ark_each_pack(round, [&](int u, bool inside, int i0, int i1, int i2, int i3) {
      ids[u] = 0;
      if (inside) ids[u] = index(i0, i1, i2, i3);
    });
    int places[ROUNDS];
    bool fine = true;
#pragma unroll
    for (int u = 0; u < ROUNDS; ++u) {
      const auto at = FROM_END && ids[u] < 0 ? ids[u] + SIZE : ids[u];
      const bool known = at >= 0 && at < SIZE;
      places[u] = known ? static_cast<int>(at) : 0;
      fine = fine && known;
    }
    if (!fine) {
      for (int u = 0; u < ROUNDS; ++u) ark_looked_up<FROM_END>(c, ids[u], SIZE);
    }
    decltype(ark_load_pack<PACK>(from(0, 0, 0, 0, 0))) held[ROUNDS] = {};
    ark_each_pack(round, [&](int u, bool inside, int i0, int i1, int i2, int i3) {
      if (inside) held[u] = ark_load_pack<PACK>(from(places[u], i0, i1, i2, i3));
    });
    ark_each_pack(round, [&](int u, bool inside, int i0, int i1, int i2, int i3) {
      if (inside) ark_store_pack<PACK>(to(i0, i1, i2, i3), held[u]);
    });
  });
}
