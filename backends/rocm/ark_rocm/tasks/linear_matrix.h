// Linear layers of one input row by matrix units. The waves divide every row of the task's weights
// into equal parts along k. The last parts may extend past the row's end, where the input counts as
// zero. So a wave reads only its own part of the input, keeps it in registers, and synchronises
// with the other waves once, for the sums.
//
// A load of a wave reads 256 bytes of each of four rows. The loaded registers are operands of two
// matrix instructions without a conversion. Such an instruction multiplies sixteen 4x4x4 blocks;
// block b has the elements 8 b to 8 b + 7 of the four rows. The columns of the other operand are
// three parts of the input, of 8 bits of the significand each, whose sum is the input exactly. The
// fourth column is zero.

// A forward declaration: the type is defined in ark/tasks/linear_epilogue.h, which follows later in
// the kernel's source.
template <class E, class B>
struct ArkBiasedSums;

// Loads the bias of a row before the sums are complete, so that it is in the L1 cache when the
// epilogue loads it; returns 0 if there is no bias.
template <class E>
ARK_DEVICE float ark_bias_ahead(ArkCtx&, const E&, int) {
  return 0.0f;
}
template <class E, class B>
ARK_DEVICE float ark_bias_ahead(ArkCtx& c, const ArkBiasedSums<E, B>& e, int row) {
  return ark_load(c, e.bias, 0, 0, 0, row);
}

typedef float ark_mfma_sums __attribute__((ext_vector_type(4)));
typedef short ark_mfma_pack __attribute__((ext_vector_type(4)));

// Packs the upper 16 bits of two floats into a word.
ARK_DEVICE ark_u32 ark_upper_pair(float low, float high) {
  return __builtin_amdgcn_perm(ark_float_bits(high), ark_float_bits(low), 0x07060302u);
}

// Limits an index to a row of K elements: returns k, or K - 1 if k is past the row's end. PART: the
// number of a row's elements that a wave reads.
template <int K, int PART>
ARK_DEVICE int ark_part_at(int k) {
  return K % (PART * ARK_WARPS) == 0 || k < K ? k : K - 1;
}

// A lane's EACH elements of a wave's part of the input. The part begins at element `first`. The
// lane's elements are ARK_LANES apart. One method issues the reads, another returns the elements.
// Elements past the row's end are zero.
template <int K, int EACH, int PART, class X>
struct ArkPartInput {
  const X& x;
  int first;
  float v[EACH];

  ARK_METHOD void ask(ArkCtx&) {}
  ARK_METHOD void take(ArkCtx& c, int) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = first + ark_lane() + e * ARK_LANES, at = ark_part_at<K, PART>(k);
      // A mask sets elements past the end to zero. With a branch, the compiler would wait for each
      // load.
      const ark_u32 mask = at == k ? ~0u : 0u;
      v[e] = ark_bits_float(ark_float_bits(ark_load(c, x, 0, 0, 0, at)) & mask);
    }
  }
};
template <int K, int EACH, int PART, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkPartInput<K, EACH, PART, ArkOperand<const ark_u64, S0, S1, S2, S3, SYSTEM>> {
  const ArkOperand<const ark_u64, S0, S1, S2, S3, SYSTEM>& x;
  int first;
  float v[EACH];
  ark_u64 seen[EACH];

  ARK_METHOD const ark_u64* mine(int e) const {
    return ark_address(x, 0, 0, 0, ark_part_at<K, PART>(first + ark_lane() + e * ARK_LANES));
  }
  ARK_METHOD void ask(ArkCtx&) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) seen[e] = ark_packet_load(mine(e), SYSTEM);
  }
  // True if all packets are of the current iteration. The test uses one branch for all packets.
  ARK_METHOD bool ready(ArkCtx& c) const {
    const ark_u32 epoch = c.iteration + 1u;
    ark_u32 other = 0u;
#pragma unroll
    for (int e = 0; e < EACH; ++e) other |= static_cast<ark_u32>(seen[e] >> 32) ^ epoch;
    return ark_warp_all(other == 0u);
  }
  // If some packets have not arrived, the wave polls one of them until it has arrived, and then
  // reads all packets again. Polls of many packets at a time would delay each other.
  ARK_METHOD void take(ArkCtx& c, int patience) {
    if (!ready(c)) {
      const int polled = static_cast<int>(c.processor * 61u % static_cast<ark_u32>(PART));
      const ark_u64* gate = ark_address(x, 0, 0, 0, ark_part_at<K, PART>(first + polled));
      if (ark_warp() == ARK_WARPS - 1) ark_poll_asking(c, gate, SYSTEM, patience);
      ark_wait_packet(c, gate, SYSTEM);
      for (ask(c); !ready(c) && !ark_failed(c); ask(c)) {
        const ark_u64* late = nullptr;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          if (!ark_packet_ready(c, seen[e])) late = mine(e);
        }
        if (late != nullptr) ark_wait_packet(c, late, SYSTEM);
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = first + ark_lane() + e * ARK_LANES;
      const float own = ark_bits_float(static_cast<ark_u32>(seen[e]));
      v[e] = ark_part_at<K, PART>(k) == k ? own : 0.0f;
    }
  }
};

// Splits a float into three bf16 numbers, whose sum it is: each has 8 of its 24 significant bits.
// For an infinity or a NaN, the second and the third are 0.
ARK_DEVICE void ark_three_parts(float v, ark_u16 (&part)[3]) {
  const ark_u32 bits = ark_float_bits(v);
  const float high = ark_bits_float(bits & 0xffff0000u);
  const float rest = (bits & 0x7f800000u) == 0x7f800000u ? 0.0f : v - high;
  const ark_u32 middle = ark_float_bits(rest) & 0xffff0000u;
  part[0] = static_cast<ark_u16>(bits >> 16);
  part[1] = static_cast<ark_u16>(middle >> 16);
  part[2] = static_cast<ark_u16>(ark_float_bits(rest - ark_bits_float(middle)) >> 16);
}

// Arranges a wave's part of the input as operands of the products: of each piece, lane l gets part
// l % 4 of the elements from 8 (l / 4) on. xs: shared memory of the wave, for three parts of CHUNK
// pieces.
template <int PIECES, int CHUNK>
ARK_DEVICE void ark_part_spread(const float (&v)[2 * PIECES], ark_u16* xs,
                                ark_u32x4 (&to)[PIECES]) {
  constexpr int STRIDE = CHUNK * 128 + 16;  // elements; parts begin at different banks
  const int lane = ark_lane(), column = lane % 4;
#pragma unroll
  for (int done = 0; done < PIECES; done += CHUNK) {
#pragma unroll
    for (int e = 0; e < 2 * CHUNK; ++e) {
      if (2 * done + e >= 2 * PIECES) break;
      ark_u16 part[3];
      ark_three_parts(v[2 * done + e], part);
#pragma unroll
      for (int n = 0; n < 3; ++n) xs[n * STRIDE + lane + e * ARK_LANES] = part[n];
    }
    ark_warp_sync();
#pragma unroll
    for (int p = 0; p < CHUNK; ++p) {
      if (done + p >= PIECES) break;
      const ark_u16* from = xs + (column < 3 ? column : 0) * STRIDE + p * 128 + lane / 4 * 8;
      const ark_u32x4 piece = *reinterpret_cast<const ark_u32x4*>(from);
      to[done + p] = column < 3 ? piece : ark_u32x4(0u);
    }
    ark_warp_sync();
  }
}

// The factor by which a norm multiplies a row of K elements. squares: the waves' sums of the
// elements' squares. 1 if there is no norm.
template <int K, class P>
ARK_DEVICE float ark_norm_factor(const P& prologue, const float* squares) {
  if constexpr (P::norm) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ARK_WARPS; ++w) sum += squares[w];
    return ark_rsqrt(sum / K + prologue.eps);
  }
  return 1.0f;
}

ARK_DEVICE ark_mfma_sums ark_mfma_add(ark_u32x4 w, ark_u32x4 x, ark_mfma_sums sums) {
  struct Halves {
    ark_mfma_pack low, high;
  };
  const Halves a = __builtin_bit_cast(Halves, w), b = __builtin_bit_cast(Halves, x);
  sums = __builtin_amdgcn_mfma_f32_4x4x4bf16_1k(a.low, b.low, sums, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_4x4x4bf16_1k(a.high, b.high, sums, 0, 0, 0);
}

// Adds up a product's results over the four blocks of 4 lanes in each row of 16 lanes. In block b,
// v[i] is a sum for row i ^ b, so that the additions need no selection. Returns, in the lanes of
// block b, the sum of row b.
ARK_DEVICE float ark_mfma_fold(const ark_mfma_sums& v) {
  const float low = v[0] + ark_row_move<0x141>(v[1]);  // row_half_mirror: the block beside it
  const float high = v[2] + ark_row_move<0x141>(v[3]);
  return low + ark_row_move<0x128>(high);  // row_ror 8: the block after the next
}

// Sums COUNT results of ark_mfma_fold over the wave: lane l gets the sum of fold[l % 4] for row l /
// 4. A matrix product with ones adds up the wave's four rows of 16 lanes. Shuffles would need two
// round trips to shared memory for this sum.
template <int COUNT>
ARK_DEVICE float ark_mfma_totals(const float (&fold)[4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
  const auto pair = [&](float even, float other) {
    return (odd ? other : even) + ark_row_move<0xb1>(odd ? even : other);
  };
  const float low = pair(fold[0], fold[1]);
  float row;
  if constexpr (COUNT <= 2) {
    row = low + ark_row_move<0x4e>(low);
  } else {
    const float high = pair(fold[2], fold[3]);
    row = (upper ? high : low) + ark_row_move<0x4e>(upper ? low : high);
  }
  const ark_mfma_sums zero = {0.0f, 0.0f, 0.0f, 0.0f};
  return __builtin_amdgcn_mfma_f32_16x16x4f32(1.0f, row, zero, 0, 0, 0)[0];
}

// Computes a linear layer of one input row for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1, at most ROWS rows. AHEAD: the number of groups of four rows of weights whose
// loads are in flight. Returns false if a wait has failed or the launch was aborted; the processor
// must then leave the loop.
template <int K, int ROWS, int AHEAD, int CHUNK, class X, class P, class E>
ARK_DEVICE bool ark_linear_matrix(ArkCtx& c, const ArkTask& t, const ark_bf16* weights, X x,
                                  const P& prologue, E epilogue) {
  constexpr int PIECES = (K + 128 * ARK_WARPS - 1) / (128 * ARK_WARPS), PART = PIECES * 128;
  constexpr int EACH = PART / ARK_LANES;
  constexpr bool WHOLE = PART * ARK_WARPS == K;
  constexpr int MOST = (ROWS + 3) / 4, ROUNDS = (MOST + AHEAD - 1) / AHEAD, WIDTH = E::WIDTH;
  constexpr int OWN = (ROWS / WIDTH + ARK_THREADS - 1) / ARK_THREADS;  // results of a thread
  constexpr int SPREAD = 3 * (CHUNK * 128 + 16);                       // elements of a wave's xs
  static_assert(K % 8 == 0, "whole loads");
  float* sums = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by row, wave
  float* red = sums + ROUNDS * AHEAD * 4 * ARK_WARPS;
  const int lane = ark_lane(), warp = ark_warp();
  ark_u16* xs = reinterpret_cast<ark_u16*>(red + 2 * ARK_WARPS) + warp * SPREAD;
  const int first = t.coord[0], rows = t.coord[1] - first;
  const auto* base = (const ark_global<char>*)(weights + static_cast<ark_i64>(first) * K);
  const int at = warp * PART + lane / 4 * 8;
  const auto inside = [&](int piece) { return WHOLE || at + piece * 128 < K; };
  // Past the last row, the last row is loaded again, and past a row's end the row's first elements
  // are, instead of skipping the load. With a branch, the compiler could not count the loads in
  // flight, and the next wait would be for all of them.
  const auto load = [&](int four, int piece) {
    const int row = four * 4 + (lane % 4 ^ lane / 4 % 4);
    const ark_u32 offset = static_cast<ark_u32>(row < rows ? row : rows - 1) * (2u * K);
    const ark_u32 k = static_cast<ark_u32>(inside(piece) ? at + piece * 128 : 0);
    return __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(base + (offset + k * 2u)));
  };
  float factors[EACH];
  if constexpr (P::norm) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = warp * PART + lane + e * ARK_LANES;
      factors[e] = ark_get(prologue.weight.p, ark_part_at<K, PART>(k));
    }
  }
  ark_u32x4 ring[AHEAD][PIECES];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) ring[a][p] = load(a, p);
  }
  if (!ark_enter(c)) return false;
  ArkPartInput<K, EACH, PART, X> part{x, warp * PART};
  part.ask(c);
  const int own_row = ark_tid() * WIDTH < rows ? ark_tid() * WIDTH : 0;
  const float bias = ark_bias_ahead(c, epilogue, first + own_row);
  float ahead[OWN][1][WIDTH] = {};
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row < rows) ark_sums_ahead(c, epilogue, 0, first + row, rows - row, ahead[o]);
  }
  ark_u32x4 input[PIECES];
  float own = 0.0f;  // the lane's sum of squares
  {
    // Polls for the input. No further weights are loaded before it has arrived: if the first loads
    // already fill the memory's queue, further loads would only wait in this queue.
    part.take(c, ROWS * K * 2 <= 65536 ? 1 : 4);
    float (&v)[EACH] = part.v;
    if constexpr (P::norm) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        own += v[e] * v[e];
        v[e] *= factors[e];
      }
    }
    ark_part_spread<PIECES, CHUNK>(v, xs, input);
  }
#pragma unroll 1
  for (int four = 0; four < MOST; four += AHEAD) {
    if (four * 4 >= rows) break;
#pragma unroll
    for (int begin = 0; begin < AHEAD; begin += 4) {
      constexpr int LEFT = AHEAD % 4 == 0 ? 4 : AHEAD % 4;
      float fold[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int a = begin; a < begin + 4 && a < AHEAD; ++a) {
        ark_mfma_sums total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          total = ark_mfma_add(ring[a][p], input[p], total);
          if constexpr (ROUNDS > 1) ring[a][p] = load(four + AHEAD + a, p);
        }
        fold[a - begin] = ark_mfma_fold(total);
      }
      const bool whole = begin + 4 <= AHEAD;
      const float sum = whole ? ark_mfma_totals<4>(fold, lane) : ark_mfma_totals<LEFT>(fold, lane);
      const int count = whole ? 4 : LEFT;
      const int row = (four + begin + lane % 4) * 4 + lane / 4;
      if (lane < 16 && lane % 4 < count) sums[row * ARK_WARPS + warp] = sum;
    }
    // The sum of the input's squares is needed only at the end, so it is computed while loads of
    // weights are in flight.
    if (P::norm && four == 0) {
      own = ark_warp_sum(own);
      if (lane == 0) red[warp] = own;
    }
  }
  asm volatile("" ::"v"(bias));
  ark_sync();
  const float scale = ark_norm_factor<K>(prologue, red);
  ark_split_store<ARK_WARPS>(c, epilogue, sums, scale, first, rows, ahead);
  if constexpr (P::norm) ark_sync();
  ark_sums_finish(c, t, epilogue, red);
  return true;
}
