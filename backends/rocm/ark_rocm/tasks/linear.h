// Linear layers of one input row. Every wave of the block gets an equal share of a task's weights
// for any number of rows. Rows are cut along k into parts; a part is one 16-byte load of every lane
// of a wave. The parts are assigned to the waves round-robin. A wave's first four loads (32 KB for
// a block of eight waves) are in flight before the task waits for its input. The registers that
// receive the weights are used as a ring buffer.

// A forward declaration: the type is defined in ark/tasks/linear_epilogue.h, which follows later in
// the kernel's source.
template <int S, int M, class A>
struct ArkSummed;

// Loads the weights of a task's rows, each row cut along k into parts. Multiplies a lane's elements
// of a part by the input.
template <typename T, int K, int PARTS>
struct ArkSplitRows {
  static constexpr int PIECE = static_cast<int>(16 / sizeof(T));
  static constexpr int SPAN = ARK_LANES * PIECE;
  static constexpr bool WHOLE = K % SPAN == 0;
  const ark_global<T>* weights;
  int count;  // number of parts of all rows
  int lane;

  // Past the last part or the row's end, existing data is loaded again instead of skipping the
  // load. With a branch, the compiler could not count the loads in flight, and the next wait would
  // be for all of them.
  ARK_METHOD ark_u32x4 load(int part) const {
    const int known = part < count ? part : count - 1;
    const ark_i64 start = WHOLE ? static_cast<ark_i64>(known) * SPAN
                                : static_cast<ark_i64>(known / PARTS) * K + within(known) - at();
    return __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(weights + start + at()));
  }
  ARK_METHOD float dot(int part, ark_u32x4 piece, const float* xs) const {
    const float sum = ark_piece_dot(static_cast<const T*>(nullptr), piece, xs + within(part));
    return WHOLE || part % PARTS * SPAN + at() < K ? sum : 0.0f;
  }
  ARK_METHOD int at() const { return lane * PIECE; }
  ARK_METHOD int within(int part) const {
    const int k = part % PARTS * SPAN + at();
    return WHOLE || k < K ? k : 0;
  }
};

// Sums four values v[0] to v[3] over a row of 16 lanes at once: lane l gets the sum of v[l % 4].
ARK_DEVICE float ark_row_sum_four(const float (&v)[4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
  const float low = (odd ? v[1] : v[0]) + ark_row_move<0xb1>(odd ? v[0] : v[1]);
  const float high = (odd ? v[3] : v[2]) + ark_row_move<0xb1>(odd ? v[2] : v[3]);
  float sum = (upper ? high : low) + ark_row_move<0x4e>(upper ? low : high);
  sum += ark_row_move<0x124>(sum);        // row_ror 4
  return sum + ark_row_move<0x128>(sum);  // row_ror 8
}

// Sums four values v[0] to v[3] over the whole wave at once: lane l gets the sum of v[l % 4].
ARK_DEVICE float ark_sum_four(const float (&v)[4], int lane) {
  float sum = ark_row_sum_four(v, lane);
#pragma unroll
  for (int mask = 16; mask < ARK_LANES; mask *= 2) sum += ark_shfl_xor(sum, mask);
  return sum;
}

// Copies the input row to shared memory and multiplies it by the norm's weights if there is a norm.
// Returns the norm's scale.
template <int K, class X, class P>
ARK_DEVICE float ark_split_input(ArkCtx& c, X x, const P& prologue, float* xs, float* red) {
  if constexpr (P::norm) {
    constexpr int EACH = (K + ARK_THREADS - 1) / ARK_THREADS;
    float factors[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = ark_tid() + e * ARK_THREADS;
      factors[e] = k < K ? ark_get(prologue.weight.p, k) : 0.0f;
    }
    float squares = ark_load_row<false>(c, x, 0, K, xs);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = ark_tid() + e * ARK_THREADS;
      if (k < K) xs[k] *= factors[e];
    }
    return ark_rsqrt(ark_block_sum(squares, red) / K + prologue.eps);
  } else {
    ark_load_row<false>(c, x, 0, K, xs);
    return 1.0f;
  }
}

// If the input consists of packets, one wave first polls one packet until it has arrived. Then all
// threads read their packets. If all threads polled, they would delay each other and the loads of
// weights.
template <int K, typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE bool ark_gate(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x) {
  if constexpr (ark_packets<T>) {
    if (ark_warp() == 0) {
      const int k = static_cast<int>(c.processor * 61u % static_cast<ark_u32>(K));
      ark_wait_packet(c, ark_address(x, 0, 0, 0, k), SYSTEM);
    }
    return ark_agree(!ark_failed(c));
  } else {
    return true;
  }
}
template <int K, int S, int M, class A>
ARK_DEVICE bool ark_gate(ArkCtx& c, const ArkSummed<S, M, A>& x) {
  return ark_gate<K>(c, x.shares);
}

// Adds up the parts of each row (or pair of rows) that a thread stores, applies the epilogue and
// stores the result. sums: the sum of each part of each row, in shared memory. ahead: operands of
// the epilogue that were loaded earlier.
template <int PARTS, int OWN, class E>
ARK_DEVICE void ark_split_store(ArkCtx& c, E& epilogue, const float* sums, float scale, int first,
                                int rows, float (&ahead)[OWN][1][E::WIDTH]) {
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * E::WIDTH;
    if (row >= rows) continue;
    float total[E::WIDTH];
#pragma unroll
    for (int r = 0; r < E::WIDTH; ++r) {
      total[r] = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) total[r] += sums[(row + r) * PARTS + p];
      total[r] *= scale;
    }
    ark_sums_store(c, epilogue, 0, first + row, rows - row, total, ahead[o][0]);
  }
}

// Computes a linear layer of one input row for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1, at most ROWS rows. Returns false if a wait has failed or the launch was aborted;
// the processor must then leave the loop.
template <typename T, int K, int PARTS, int ROWS, class X, class P, class E>
ARK_DEVICE bool ark_linear_split(ArkCtx& c, const ArkTask& t, const T* weights, X x,
                                 const P& prologue, E epilogue) {
  constexpr int AHEAD = 4, WIDTH = E::WIDTH;
  constexpr int OWN = (ROWS / WIDTH + ARK_THREADS - 1) / ARK_THREADS;  // results of a thread
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* sums = xs + K;
  float* red = sums + ROWS * PARTS + AHEAD * ARK_WARPS;  // + extra sums of the last round
  const int first = t.coord[0], rows = t.coord[1] - first;
  const ArkSplitRows<T, K, PARTS> split{ark_to_global(weights) + static_cast<ark_i64>(first) * K,
                                        rows * PARTS, ark_lane()};
  const int warp = ark_warp();
  ark_u32x4 ring[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) ring[a] = split.load(warp + a * ARK_WARPS);
  if (!ark_enter(c)) return false;
  if (!ark_gate<K>(c, x)) return false;
  float ahead[OWN][1][WIDTH] = {};
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row < rows) ark_sums_ahead(c, epilogue, 0, first + row, rows - row, ahead[o]);
  }
  const float scale = ark_split_input<K>(c, x, prologue, xs, red);
  ark_sync();
#pragma unroll 1
  for (int part = warp; part < split.count; part += AHEAD * ARK_WARPS) {
    float sum[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = part + a * ARK_WARPS;
      sum[a] = split.dot(at, ring[a], xs);
      ring[a] = split.load(at + AHEAD * ARK_WARPS);
    }
    const float total = ark_sum_four(sum, split.lane);
    if (split.lane < AHEAD) sums[part + split.lane * ARK_WARPS] = total;
  }
  ark_sync();
  ark_split_store<PARTS>(c, epilogue, sums, scale, first, rows, ahead);
  ark_sums_finish(c, t, epilogue, red);
  return true;
}
