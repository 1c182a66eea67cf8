// A few rows, one of each sequence of a batch, through a linear layer in the variant `roles`: as in
// linear_roles.h, but sums are products of matrix units (m16n8k16), in which the input's rows are
// rows of a tile, whose upper eight are zero, and the weights' rows are its columns. So up to eight
// rows cost what one does.

constexpr int ARK_ROW_PAD = 64;  // bytes between rows in shared memory: they begin at other banks

// d += a b for a tile of 16 by 8, 16 deep, of which a's upper eight rows are zero.
ARK_DEVICE void ark_multiply_rows(const ark_bf16*, float (&d)[4], ark_u32 a0, ark_u32 a1,
                                  ark_u32 b0, ark_u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, "
      "{%7, %8}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(0u), "r"(b0), "r"(b1));
}
ARK_DEVICE void ark_multiply_rows(const ark_f16*, float (&d)[4], ark_u32 a0, ark_u32 a1, ark_u32 b0,
                                  ark_u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, "
      "{%7, %8}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(0u), "r"(b0), "r"(b1));
}

template <typename A, typename B>
constexpr bool ark_same = false;
template <typename A>
constexpr bool ark_same<A, A> = true;

// Copies M rows of K elements of the same type, which begin at multiples of 16 bytes.
template <int M, int K, int PITCH>
ARK_DEVICE void ark_batch_copy(const void* p, void* xs) {
  constexpr int EACH = K / 8;
  for (int i = ark_tid(); i < M * EACH; i += ARK_THREADS) {
    const ark_u32 to = ark_shared_address(xs) + (i / EACH * PITCH + i % EACH * 8) * 2;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(static_cast<const char*>(p) + 16 * i)
                 : "memory");
  }
  ark_copies_done();
}

// Loads M rows of K elements, times `factor` if NORM, to xs, PITCH elements apart; adds this
// thread's squares of each row to `square`.
template <int M, int K, int PITCH, bool NORM, typename P, typename T, int F>
ARK_DEVICE void ark_batch_rows(ArkCtx& c, const P* p, const float (&factor)[F], T* xs,
                               float (&square)[M], bool system) {
  if constexpr (ark_same<P, T> && !NORM) {
    if (ark_aligned(reinterpret_cast<ark_u64>(p))) return ark_batch_copy<M, K, PITCH>(p, xs);
  }
  // Fewer warps have more registers, and fewer trips to memory do.
  constexpr int MOST = ARK_WARPS > 9 ? 12 : 20;
  constexpr int EACH = ARK_ROW_PAIRS<K>, ALL = M * EACH, N = ALL < MOST ? ALL : MOST;
  constexpr int ROUNDS = (ALL + N - 1) / N;
#pragma unroll(NORM ? ROUNDS : 1)
  for (int first = 0; first < ALL; first += N) {
    float v[2 * N];
    const auto row = [&](int i) { return (first + i) / EACH; };
    const auto place = [&](int i) { return 2 * ((first + i) % EACH * ARK_THREADS + ark_tid()); };
    const auto there = [&](int i) { return first + i < ALL && place(i) < K; };
    const auto at = [&](int i) -> const P* {
      return there(i) ? p + row(i) * K + place(i) : nullptr;
    };
    ark_load_pairs<N>(c, p, at, v, system);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!there(i)) continue;
      float a = v[2 * i], b = v[2 * i + 1];
      if constexpr (NORM) {
        float& own = square[row(i)];
        own = fmaf(a, a, fmaf(b, b, own));
        a *= factor[2 * ((first + i) % EACH)], b *= factor[2 * ((first + i) % EACH) + 1];
      }
      ark_narrow(xs + row(i) * PITCH + place(i), a, b);
    }
  }
}

// Products of M rows of the input with R rows of the weights, both K long in shared memory, PITCH
// and WIDTH apart: lane l gets those of input row l / 4 with weight rows l % 4 * 2 and the next.
// A product takes long to come and shared memory too: DEEP pieces of 32 are asked for while those
// before are multiplied, each piece's sums by themselves.
template <int M, int R, int K, int PITCH, int WIDTH, typename T>
ARK_DEVICE void ark_batch_dots(const T* w, const T* x, float (&sum)[2]) {
  constexpr int ALL = K / 32, DEEP = ALL % 4 == 0 ? 4 : ALL % 2 == 0 ? 2 : 1;
  const int row = ark_lane() / 4, piece = ark_lane() % 4 * 8;
  const uint4* from = reinterpret_cast<const uint4*>(x + row * PITCH + piece);
  const uint4* by = reinterpret_cast<const uint4*>(w + row * WIDTH + piece);
  const uint4 none = make_uint4(0u, 0u, 0u, 0u);
  float d[DEEP][2][4] = {};
  uint4 a[DEEP], b[DEEP];
  const auto ask = [&](int first) {
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      a[i] = row < M ? from[4 * (first + i)] : none;
      b[i] = row < R ? by[4 * (first + i)] : none;
    }
  };
  ask(0);
#pragma unroll 1
  for (int first = DEEP; first <= ALL; first += DEEP) {
    uint4 x0[DEEP], w0[DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) x0[i] = a[i], w0[i] = b[i];
    if (first < ALL) ask(first);
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      ark_multiply_rows(w, d[i][0], x0[i].x, x0[i].y, w0[i].x, w0[i].y);
      ark_multiply_rows(w, d[i][1], x0[i].z, x0[i].w, w0[i].z, w0[i].w);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sum[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) sum[e] += d[i][0][e] + d[i][1][e];
  }
}

// As ark_row_total, of the M rows that lanes with `mine` have (row m) of a weights' row.
template <int M, int P>
ARK_DEVICE bool ark_batch_total(bool mine, int m, int row, int number, float* parts,
                                ark_u32* counts, float& sum) {
  volatile float* own = parts + row * P * M + m;
  if (mine) own[number * M] = sum;
  __threadfence_block();
  __syncwarp();
  ark_u32 before = 0u;
  if (ark_lane() == 0) before = atomicAdd(&counts[row], 1u);
  if (__shfl_sync(0xffffffffu, before, 0) != P - 1) return false;
  __threadfence_block();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (mine) sum += own[i * M];
  }
  return true;
}

// coord, W, K, R, P, TASK_ROWS, XS: as of ark_linear_roles; M: rows of the input.
template <typename W, int K, int R, int P, int TASK_ROWS, int XS, int M, class X, class N, class S>
ARK_DEVICE bool ark_linear_batch(ArkCtx& c, const ArkTask& t, X input, const N& prologue,
                                 S epilogue) {
  constexpr int PITCH = K + ARK_ROW_PAD / static_cast<int>(sizeof(W)), OWN = R > 1 ? 2 : 1;
  W* xs = reinterpret_cast<W*>(ARK_SCRATCH(c));
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c) + XS);
  float* parts = squares + ARK_WARPS * M;
  ark_u32* counts = reinterpret_cast<ark_u32*>(parts + TASK_ROWS * P * M);
  const int end = t.coord[1], m = ark_lane() / 4, own = ark_lane() % 4 * 2;
  const bool mine = m < M && own < R;
  const int first = static_cast<int>((static_cast<ark_u32>(ark_warp()) + ARK_WARPS -
                                      (ark_stages_before(c) + t.fetch_begin) % ARK_WARPS) %
                                     ARK_WARPS);
  const auto row_of = [&](int j) { return t.coord[0] + j / P * R + own; };
  float ahead[1][OWN] = {};
  const auto prepare = [&](int row) {
    if (mine && row < end) ark_sums_ahead(c, epilogue, m, row, end - row, ahead);
  };
  if constexpr (!S::WAITS) prepare(row_of(first));
  float factor[N::norm ? 2 * ARK_ROW_PAIRS<K> : 1];
  if constexpr (N::norm) ark_row_factors<K>(prologue.weight.p, factor);
  if (!ark_enter(c)) return false;
  if constexpr (S::WAITS) prepare(row_of(first));
  if constexpr (P > 1) {
    for (int i = ark_tid(); i < TASK_ROWS; i += ARK_THREADS) counts[i] = 0u;
  }
  float square[M] = {};
  ark_batch_rows<M, K, PITCH, N::norm>(c, input.p, factor, xs, square, X::system);
  if constexpr (N::norm) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const float all = ark_warp_sum(square[i]);
      if (ark_lane() == 0) squares[ark_warp() * M + i] = all;
    }
  }
  ark_gathered();
  float scale = 1.0f;
  if constexpr (N::norm) {
    float all = 0.0f;
    for (int w = 0; mine && w < ARK_WARPS; ++w) all += squares[w * M + m];
    scale = ark_rsqrt(all / K + prologue.eps);
  }
  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  for (int j = first; j < stages; j += ARK_WARPS) {
    const int row = row_of(j);
    if (j != first) prepare(row);
    const W* w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + j));
    float sum[2];
    ark_batch_dots<M, R, K / P, PITCH, K>(w, xs + j % P * (K / P), sum);
    ark_stage_done(c, t.fetch_begin + j);
    if constexpr (P > 1) {
      if (!ark_batch_total<M, P>(mine, m, j / P, j % P, parts, counts, sum[0])) continue;
    }
    float sums[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) sums[i] = sum[i] * scale;
    if (mine && row < end) ark_sums_store(c, epilogue, m, row, end - row, sums, ahead[0]);
  }
  return true;
}
