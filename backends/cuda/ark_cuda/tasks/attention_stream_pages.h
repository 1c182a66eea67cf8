// Attention of one row over pages of keys and values that come through the operand ring. The
// loading warp looks up the pages. All other steps are those of ark_attention_staged
// (attention_stream.h).

// Like ark_attention_staged, for keys and values in pages. Task coordinates: row, key/value head,
// split. MOST: the most pages that a sequence can have. Returns false if a wait has failed or the
// launch was aborted; the processor must then leave the loop.
template <typename T, int G, int KV_HEADS, int D, int PAGE, int POOL, int MOST, int SPLITS,
          int STEP, int WARPS, class Q, class K, class N, class P, class O, class F>
ARK_DEVICE bool ark_attention_staged_pages(ArkCtx& c, const ArkTask& t, float scale, Q query,
                                           K keys, N pages, P position, O output, F fresh) {
  constexpr int ROOM = PAGE * MOST;
  // A page number outside of the pool ends the run. It suffices to check the page table once before
  // its entries are used, because the table is not written during the iteration.
  const ark_u32 split = static_cast<ark_u32>(t.coord[2]);
  const ArkGrown rows = ark_grown(static_cast<ark_u32>(position.p[0]), ROOM, split, SPLITS);
  ark_check_pages<ROOM>(c, ark_paged<PAGE, POOL>(keys, pages), position,
                        static_cast<int>(rows.begin), static_cast<int>(rows.end));
  __syncwarp();
  return ark_attention_staged<T, G, KV_HEADS, D, ROOM, SPLITS, STEP, WARPS, 0>(
      c, t, scale, query, position, output, fresh);
}
