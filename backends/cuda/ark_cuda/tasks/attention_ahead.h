// Attention of tiles of queries on mma.sync, if one block contains all keys of a tile. A crew is
// the group of warps that compute one tile; a strip is the part of a tile that a crew computes at
// once (attention_units.h). A crew has four slots, each for a block of keys or values. Two slots
// hold the current strip's keys and values. Before the crew computes the strip, it starts to copy
// the next strip's queries, and its keys and values to the other two slots. So it seldom waits for
// copies.

// Starts the copies of a strip's queries to shared memory, and of its keys and values to the slots
// at `slots`.
template <class U, class S, class Q, class K, class V>
ARK_DEVICE void ark_attention_ahead(ark_u32 base, ark_u32 slots, const ArkAttentionStrip& strip,
                                    const Q& query, const K& keys, const V& values) {
  const ArkAttentionPlace<U> w(strip);
  const auto operand = query(*strip.task);
  const auto from = [&](int row) {
    return ark_address(operand, 0, strip.tile.batch, strip.tile.row + row, strip.tile.head * S::D);
  };
  ark_attention_copy<U, S::D, U::ROWS, U::THREADS>(base, w.thread, 0, strip.rows, from);
  ark_attention_fetch<U, S>(strip.tile, keys(*strip.task), slots, w, 0);
  ark_attention_fetch<U, S>(strip.tile, values(*strip.task), slots + U::SLOT, w, 0);
}

// The loop of a crew over its strips (parts of a task). strips: two descriptions. The crew's first
// thread (`leads`) has initialised the first one. Other arguments as for ark_attention_units.
template <class U, class S, class Q, class K, class V, class O, class P, class N, class M>
ARK_DEVICE void ark_attention_crew(char* shared, ArkAttentionStrip* strips, int crew, bool leads,
                                   float scale, float cap, const Q& query, const K& keys,
                                   const V& values, const O& output, const P& position,
                                   const N& sinks, const M& mask) {
  typedef decltype(mask(*strips->task)) Mask;
  const float factor = (S::CAPPED || Mask::given ? 1.0f : scale) * ARK_ATTENTION_LOG2E;
  const float by = S::CAPPED ? 1.0f : scale;
  const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
  const auto slots = [&](const ArkAttentionPlace<U>& w, int pair) {
    return base + w.ring() + pair * (2 * U::SLOT);
  };
  if (leads) ark_attention_advance<U, S>(strips[0], position(*strips[0].task));
  ark_attention_meet_crew<U>(crew);
  if (strips[0].rows > 0) {
    const ArkAttentionPlace<U> w(strips[0]);
    ark_attention_ahead<U, S>(base, slots(w, 0), strips[0], query, keys, values);
  }
#pragma unroll 1
  for (int pair = 0; strips[pair].rows > 0; pair ^= 1) {
    const ArkAttentionStrip& strip = strips[pair];
    ArkAttentionStrip& next = strips[pair ^ 1];
    if (leads) {
      next = strip;
      ark_attention_advance<U, S>(next, position(*next.task));
    }
    const ArkAttentionPlace<U> w(strip);
    // The mask that is added to the scores. It is loaded while the copies of keys and values
    // arrive.
    ArkAttentionMasks<U::SCORES, Mask> masks;
    masks.template load<S>(mask(*strip.task), strip.tile, 16 * w.slab + w.lane / 4,
                           w.part * U::SCORES);
    ark_copies_but<0>();
    w.meet_crew();  // the operands have arrived, and `next` is set
    ark_u32 held[U::STEPS][4];
    ark_attention_hold<U>(held, base, w);
    w.meet_crew();  // the queries are in registers
    if (next.rows > 0) {
      ark_attention_ahead<U, S>(base, slots(w, pair ^ 1), next, query, keys, values);
    }
    ArkAttentionSums<U> sums;
    ark_attention_clear(sums, sinks(*strip.task), strip.tile.head, 0);
    const ark_u32 own = slots(w, pair);
    ark_u32 p[U::KEYS / 4];
    const auto under = [&](float (&s)[U::SCORES / 2], const ArkAttentionTile& tile, int row,
                           int key) {
      masks.template apply<S>(s, mask(*strip.task), tile, row, key, by);
    };
    if (strip.tile.begin < strip.tile.end &&
        ark_attention_exponentials<U, S>(shared, strip, 0, base, own, held, factor, scale, cap,
                                         sums, p, under)) {
      ark_attention_weighted<U>(shared, w, own + U::SLOT, p, sums);
    }
    float share[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      share[half] = ark_attention_share<S>(sums.powers[2 * half]);
    }
    ark_attention_scale(sums, share);
    const int first = 16 * w.slab, rows = strip.rows - first;
    const auto operand = output(*strip.task);
    auto* to =
        ark_address(operand, 0, strip.tile.batch, strip.tile.row + first, strip.tile.head * S::D);
    char* const mine = shared + w.ring() + pair * (2 * U::SLOT) + w.thread / 32 * U::PART;
    // All warps have read the keys and values, so their slots may be used for results. From here on
    // no warp reads the variable `strip`: its memory is used to describe the strip after the next
    // one.
    w.meet_crew();
    if (rows > 0) {
      ark_attention_out<U, S::D>(mine, sums.values, w.lane, w.part, rows, to,
                                 ark_at(operand, 0, 0, 1, 0));
    }
  }
}
