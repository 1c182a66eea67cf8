// Attention of one row in the variant `matrix` over pages of keys and values. The loading thread
// looks up the pages (attention_boxed.h), so the steps are those of ark_attention_boxed.

// Like ark_attention_boxed, for keys and values in pages. MOST: the most pages of a sequence.
template <typename T, int G, int KV_HEADS, int D, int PAGE, int POOL, int MOST, int SPLITS,
          int AT_Q, int AT_P, int AT_O, int AT_F, class Q, class K, class N, class P, class O,
          class F>
ARK_DEVICE void ark_attention_boxed_pages(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys,
                                          N pages, P position, O output, F fresh) {
  constexpr int ROOM = PAGE * MOST;
  const ark_u32 split = static_cast<ark_u32>(t.coord[2]);
  const ArkGrown rows = ark_grown(static_cast<ark_u32>(position.p[0]), ROOM, split, SPLITS);
  ark_check_pages<ROOM>(c, ark_paged<PAGE, POOL>(keys, pages), position,
                        static_cast<int>(rows.begin), static_cast<int>(rows.end));
  ark_attention_boxed<T, G, KV_HEADS, D, ROOM, SPLITS, AT_Q, AT_P, AT_O, AT_F>(
      c, t, scale, query, position, output, fresh);
}
