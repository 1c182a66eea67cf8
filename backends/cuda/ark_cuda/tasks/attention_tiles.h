// Attention of tiles of 128 queries by warpgroups, in the variant `matrix`. Each warpgroup has 64
// rows of queries, whose scores and sums stay in registers. The loading thread loads the queries
// once. It loads keys and values through the ring, in blocks of BN. While a warpgroup computes the
// softmax of one block, matrix units compute the scores of a block and the product of the preceding
// block's exponentials with its values (FlashAttention-3, Shah et al. 2024).
// ark/tasks/attention_tiles.py describes the task.

// The layout of shared memory. DP: columns of a head, padded with zeros. BN: keys per stage. Q: how
// many query tiles shared memory holds.
template <int DP, int BN, int Q>
struct ArkAttentionRing {
  static constexpr int BOXES = DP / 64;
  static constexpr ark_u32 QUERIES = 128u * DP * 2u, STAGE = BN * DP * 2u;
  static_assert(Q * QUERIES + ARK_MATRIX_STAGES * STAGE <= ARK_MATRIX_STAGES * ARK_MATRIX_STAGE,
                "shared memory");
  static_assert(QUERIES % ARK_SHARED_ALIGNMENT == 0 && STAGE % ARK_SHARED_ALIGNMENT == 0,
                "operands begin where swizzled boxes must");
};
template <class R, int Q>
ARK_DEVICE char* ark_attention_queries(ArkCtx& c, int round) {
  return ark_matrix_stage(c, 0u) + round % Q * R::QUERIES;
}
template <class R, int Q>
ARK_DEVICE char* ark_attention_stage(ArkCtx& c, ark_u32 n) {
  static_assert(ARK_MATRIX_STAGES == 4u, "a number may wrap");
  return ark_matrix_stage(c, 0u) + Q * R::QUERIES + n % ARK_MATRIX_STAGES * R::STAGE;
}
ARK_DEVICE ark_u32 ark_attention_operand(const char* at, ark_u32 lead) {
  return ark_matrix_operand(ark_shared_address(at), lead);
}

// Loading thread: copies BOXES neighbouring boxes of 64 columns each.
template <int BOXES, ark_u32 BYTES>
ARK_DEVICE void ark_attention_boxes(char* to, ark_u64 map, int x, int y, int z, ark_u64* full) {
#pragma unroll
  for (int i = 0; i < BOXES; ++i) ark_box_load(to + i * BYTES, map, 64 * i, x, y, z, full);
}

// The loading thread's part of a task. The order of stages is: the keys of the first block; then,
// for each further block, its keys and the preceding block's values; then the last block's values.
// Blocks go from the last keys to the first.
template <class S, int DP, int BN, int Q, class P>
ARK_DEVICE void ark_attention_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load,
                                   ark_u64 queries, ark_u64 keys, ark_u64 values, P position) {
  typedef ArkAttentionRing<DP, BN, Q> R;
  int round = 0;
  load.whole = true;
  if (!ark_matrix_drained(load)) load.stopped = true;
  ark_attention_each<S>(t, position, [&](const ArkAttentionTile& tile) {
    const int last = (tile.end + BN - 1) / BN - 1, first = tile.begin / BN,
              kv = tile.head / S::PER_KV;
    if (load.stopped || tile.begin >= tile.end) return;
    if (Q == 1 && round > 0 && !ark_matrix_drained(load)) load.stopped = true;
    for (int b = last; b >= first - 1; --b) {
#pragma unroll
      for (int value = 0; value < 2; ++value) {
        const int block = b + value;  // the stage of the preceding block's values
        if (load.stopped || block < first || block > last) continue;
        if (!ark_matrix_free(load)) {
          load.stopped = true;
          return;
        }
        ark_u64* full = &ark_matrix.full[load.at.slot];
        const bool begins = value == 0 && block == last;
        ark_matrix_expect(full, R::STAGE + (begins ? R::QUERIES : 0u));
        if (begins) {
          ark_attention_boxes<R::BOXES, 16384u>(ark_attention_queries<R, Q>(c, round), queries,
                                                tile.head, tile.row, tile.batch, full);
        }
        ark_attention_boxes<R::BOXES, BN * 128u>(ark_attention_stage<R, Q>(c, load.at.slot),
                                                 value == 0 ? keys : values, BN * block, kv,
                                                 tile.batch, full);
        ark_matrix_issued(load);
      }
    }
    ++round;
  });
}

// The two products of a warpgroup. The first one computes scores: 64 queries times BN keys, summed
// over DP elements. The second one multiplies the exponentials of these scores by BN values.
template <typename T, int DP, int BN>
struct ArkAttentionProducts {
  typedef T type;
  ARK_DEVICE_MEMBER static void scores(float (&d)[BN / 2], ark_u32 a, ark_u32 b) {
#pragma unroll
    for (int i = 0; i < DP / 16; ++i) {
      ArkWgmma<BN, T, T, false, false>::multiply(d, a + i / 4 * 1024 + i % 4 * 2,
                                                 b + i / 4 * (BN * 8) + i % 4 * 2, i > 0);
    }
  }
  ARK_DEVICE_MEMBER static void values(float (&d)[DP / 2], ark_u32 (&p)[BN / 4], ark_u32 b) {
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
      ArkWgmmaHeld<DP, T>::multiply(d, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                                    b + 128 * i);
    }
  }
};

// An empty instruction that keeps the compiler from moving uses of these registers across this
// point.
template <int N>
ARK_DEVICE void ark_matrix_hold(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
template <int N>
ARK_DEVICE void ark_matrix_hold(ark_u32 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(v[i])::"memory");
}
ARK_DEVICE void ark_matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ARK_DEVICE void ark_matrix_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
ARK_DEVICE void ark_matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes two warpgroups alternate (ping-pong): one multiplies while the other computes the
// exponentials of its scores. At the barrier, one warpgroup hands the matrix unit over to the
// other.
ARK_DEVICE void ark_attention_pingpong(int group) {
  __syncwarp();
  asm volatile("barrier.sync %0, 256;" ::"r"(14 + group) : "memory");
}
ARK_DEVICE void ark_attention_pass(int group) {
  __syncwarp();
  asm volatile("barrier.arrive %0, 256;" ::"r"(14 + group) : "memory");
}

// The computing warps' part of a task. W: the two kinds of products, queries with keys and
// exponentials with values. logarithms: a function that returns the task's operand for each row's
// logarithm of the sum of exponentials.
template <class S, class W, int DP, int BN, int Q, class O, class P, class N, class M,
          class L = ArkAttentionNone>
ARK_DEVICE void ark_attention_warpgroups(ArkCtx& c, const ArkTask& t, float scale, float cap,
                                         O output, P position, N sinks, M mask,
                                         const L& logarithms = {}) {
  typedef ArkAttentionRing<DP, BN, Q> R;
  typedef typename W::type T;
  constexpr float LOG2E = 1.44269504f;
  const int group = ark_warp() / 4, first = ark_tid() % 128 == 0;
  const int own = 16 * ark_warp() + ark_lane() / 4;  // the thread's first row
  // The number of stages that this warp has used. It takes one register; slot and parity are
  // computed from it.
  const ArkMatrixSlot begun = ark_matrix_place_of();
  ark_u32 used = begun.slot + begun.parity * ARK_MATRIX_STAGES;
  const auto filled = [&](ark_u32 n) {
    ark_matrix_filled(c, ark_shared_address(&ark_matrix.full[n % ARK_MATRIX_STAGES]),
                      n / ARK_MATRIX_STAGES & 1u);
  };
  int round = 0;
  const float factor = S::CAPPED || M::given ? LOG2E : scale * LOG2E;
  ark_attention_each<S>(t, position, [&](const ArkAttentionTile& tile) {
    float o[DP / 2];
    ArkAttentionRows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.top[half] = -1e30f;
      rows.weight[half] = 0.0f;
      if constexpr (N::given) {
        rows.top[half] = sinks.p[tile.head] * LOG2E;
        rows.weight[half] = ark_lane() % 4 == 0 ? 1.0f : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < DP / 2; ++i) o[i] = 0.0f;
    const int last = (tile.end + BN - 1) / BN - 1, least = tile.begin / BN;
    if (tile.begin < tile.end) {
      const int place = tile.place + own;
      const ark_u32 a =
          ark_attention_operand(ark_attention_queries<R, Q>(c, round) + group * 8192, 1u);
      const auto release = [&](ark_u32 n) {
        if (first) {
          ark_matrix_release(ark_shared_address(&ark_matrix.empty[n % ARK_MATRIX_STAGES]));
        }
      };
      float s[BN / 2] = {}, keep[2];
      ark_u32 p[BN / 4];
      // Applies scale, soft cap and masks to a block's scores before they become exponentials.
      const auto finish = [&](int block) {
        if constexpr (S::CAPPED) {
#pragma unroll
          for (int i = 0; i < BN / 2; ++i) s[i] = cap * ark_tanh(s[i] * scale / cap);
        }
        const int key = block * BN, above = tile.place + 64 * group;
        if constexpr (M::given) {
          ark_attention_under<S, BN>(s, mask, tile, own, key, S::CAPPED ? 1.0f : scale);
        }
        const bool whole = key + BN <= ark_attention_end<S>(above) &&
                           (S::WINDOW == 0 || key >= ark_attention_first<S>(above + 63));
        if (!whole) ark_attention_mask<S, BN>(s, place, key);
        ark_attention_powers<BN>(s, rows, factor, keep);
      };
      filled(used);
      ark_matrix_fence();
      W::scores(s, a, ark_attention_operand(ark_attention_stage<R, Q>(c, used), 1u));
      ark_matrix_commit();
      ark_matrix_wait<0>();
      ark_matrix_hold(s);
      release(used++);
      finish(last);
      ark_attention_round<T, BN>(s, p);
      filled(used);
      if (group == 1 && least < last) ark_attention_pass(0);
#pragma unroll 1
      for (int block = last - 1; block >= least; --block) {
        ark_attention_pingpong(group);
        ark_matrix_hold(s);
        ark_matrix_fence();
        W::scores(s, a, ark_attention_operand(ark_attention_stage<R, Q>(c, used), 1u));
        ark_matrix_commit();
        filled(used + 1u);
        ark_matrix_hold(o);
        ark_matrix_fence();
        W::values(o, p, ark_attention_operand(ark_attention_stage<R, Q>(c, used + 1u), BN * 8));
        ark_matrix_commit();
        if (group == 0 || block > least) ark_attention_pass(1 - group);
        ark_matrix_wait<1>();
        ark_matrix_hold(s);
        release(used);
        finish(block);
        // While matrix units multiply the values, the exponentials of the scores are computed.
        // ark_matrix_hold makes the compiler compute the exponentials before the next wait.
        ark_matrix_hold(s);
        filled(used + 2u);
        ark_matrix_wait<0>();
        ark_matrix_hold(o);
        ark_matrix_hold(p);
        release(used + 1u);
        used += 2u;
        if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
          for (int i = 0; i < DP / 2; ++i) o[i] *= keep[i / 2 % 2];
        }
        ark_attention_round<T, BN>(s, p);
      }
      ark_matrix_hold(o);
      ark_matrix_fence();
      W::values(o, p, ark_attention_operand(ark_attention_stage<R, Q>(c, used), BN * 8));
      ark_matrix_commit();
      ark_matrix_wait<0>();
      ark_matrix_hold(o);
      release(used++);
      ++round;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = rows.weight[half];
      all += ark_shfl_xor(all, 1);
      all += ark_shfl_xor(all, 2);
      if constexpr (decltype(logarithms(t))::given) {
        rows.top[half] = ark_attention_logarithm<S>(rows.top[half] / ARK_ATTENTION_LOG2E, all);
      }
      rows.weight[half] = ark_attention_share<S>(all);
    }
#pragma unroll
    for (int i = 0; i < DP / 2; ++i) o[i] *= rows.weight[i / 2 % 2];
    T* to = ark_address(output, 0, tile.batch, tile.row, tile.head * S::D);
    ark_matrix_store<T, DP>(c, o, to, ark_at(output, 0, 0, 1, 0), 16 * ark_warp(), S::M - tile.row,
                            S::D);
    if constexpr (decltype(logarithms(t))::given) {
      const int row = 16 * ark_warp() + ark_lane() / 4;
      if (ark_lane() % 4 == 0) {
        auto* at = ark_address(logarithms(t), 0, tile.batch, tile.row + row, tile.head);
        const auto pitch = ark_at(logarithms(t), 0, 0, 8, 0);
        if (tile.row + row < S::M) *at = rows.top[0];
        if (tile.row + row + 8 < S::M) at[pitch] = rows.top[1];
      }
    }
  });
  ark_matrix_keep_place(ArkMatrixSlot{used % ARK_MATRIX_STAGES, used / ARK_MATRIX_STAGES & 1u});
}
