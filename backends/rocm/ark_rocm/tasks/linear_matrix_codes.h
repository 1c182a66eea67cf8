// Linear layers of one input row with quantised weights, by matrix units. As in linear_matrix.h,
// the waves divide every row of weights along k, so that a wave needs only its part of the input.
//
// A load of a wave reads 16 bytes of codes per lane; lane l reads codes of row l % 4 of four rows.
// The codes are converted exactly to bf16. A matrix instruction multiplies sixteen blocks. The rows
// of its left operand are the three parts of the input, the columns of its right operand are the
// four rows of weights. So each lane gets the sums of the codes that its block has of the row that
// the lane has loaded, and multiplies these sums by the scale that it has loaded.

// A forward declaration: the type is defined in ark/tasks/linear_epilogue.h, which follows later in
// the kernel's source.
template <class O, class A>
struct ArkAddSums;

// Loads a task's weights and multiplies them. rows: the number of rows. bytes: the first row.
template <class ROW>
struct ArkMatrixCodes;
template <class C, int K, int GROUP, class S, bool ZERO>
struct ArkMatrixCodes<ArkRow<C, K, GROUP, S, ZERO>> {
  typedef ArkRow<C, K, GROUP, S, ZERO> Row;
  // OWN: the codes of a lane's load. STEPS: the groups of eight of these. SPAN: the codes of a row
  // in a wave's load (a piece). PART: the codes of a row that a wave reads.
  static constexpr int BITS = ARK_CODE_BITS<C>, OWN = 128 / BITS, STEPS = OWN / 8;
  static constexpr int SPAN = OWN * 16, EACH = SPAN * ARK_WARPS;
  static constexpr int PIECES = (K + EACH - 1) / EACH, PART = PIECES * SPAN;
  static constexpr bool WHOLE = PART * ARK_WARPS == K;
  // True if all codes of a row have one scale, which then multiplies the row's sum.
  static constexpr bool ONE = GROUP == K && !ZERO;
  static_assert(K % OWN == 0 && (GROUP == K || GROUP % OWN == 0), "a load's codes share a scale");
  struct Piece {
    ark_u32x4 words;
    S scale, zero;  // not loaded if ONE; the zero only if ZERO
  };
  struct Input {
    ark_u32x4 steps[STEPS];
    float plain;  // the sum of the lane's elements, if ZERO
  };
  const ark_global<char>* bytes;
  int rows;
  int lane;
  int first;  // the lane's first code of piece 0

  // Past the last row, the last row is loaded again, and past a row's end the row's first codes
  // are, where the input is zero. With a branch, the compiler could not count the loads in flight.
  ARK_METHOD Piece load(int four, int number) const {
    const int row = four * 4 + lane % 4, k = first + number * SPAN;
    const int there = WHOLE || k < K ? k : 0;
    const auto* from = bytes + static_cast<ark_u32>(row < rows ? row : rows - 1) *
                                   static_cast<ark_u32>(sizeof(Row));
    Piece piece;
    piece.words =
        __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(from + there / 8 * BITS));
    if constexpr (!ONE) {
      const auto* group = from + there / GROUP * static_cast<int>(sizeof(S));
      piece.scale = *(const ark_global<S>*)(group + Row::SCALES_AT);
      if constexpr (ZERO) piece.zero = *(const ark_global<S>*)(group + Row::ZEROS_AT);
    }
    return piece;
  }
  // Of a row's only scale.
  ARK_METHOD float scale(int row) const {
    const auto* from = bytes + static_cast<ark_u32>(row) * static_cast<ark_u32>(sizeof(Row));
    return ARK_CODE_UNIT<C> * ark_plain(S(*(const ark_global<S>*)(from + Row::SCALES_AT)));
  }
  ARK_DEVICE ark_mfma_sums multiply(const Piece& piece, const Input& input, ark_mfma_sums sums) {
    ark_u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = piece.words[i];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const ark_u32x4 codes = ark_code_pairs(static_cast<const C*>(nullptr), words + s * BITS / 4);
      sums = ark_mfma_add(input.steps[s], codes, sums);
    }
    return sums;
  }
  // The product of a lane's codes of PIECES pieces and the input.
  ARK_DEVICE float dot(const Piece (&pieces)[PIECES], const Input (&input)[PIECES]) {
    float sum = 0.0f;
    ark_mfma_sums all = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const ark_mfma_sums own = multiply(pieces[p], input[p], ONE ? all : ark_mfma_sums(0.0f));
      if constexpr (ONE) {
        all = own;
      } else {
        float part = own[0] + own[1] + own[2];
        if constexpr (ZERO) part -= ark_plain(pieces[p].zero) / ARK_CODE_UNIT<C> * input[p].plain;
        sum += ARK_CODE_UNIT<C> * ark_plain(pieces[p].scale) * part;
      }
    }
    return ONE ? all[0] + all[1] + all[2] : sum;
  }
  // The place in memory of element k of the input, in the order of the converted codes.
  ARK_DEVICE int place(int k) { return ARK_PAIRS_APART<C> ? k - k % 8 + k % 2 * 4 + k % 8 / 2 : k; }
  // Arranges a wave's part of the input as left operands: lane l gets part l % 4 of the elements
  // that are multiplied by its block's codes. xs: shared memory of the wave, for three parts of
  // CHUNK pieces.
  template <int CHUNK>
  ARK_METHOD void spread(const float (&v)[PART / ARK_LANES], ark_u16* xs,
                         Input (&to)[PIECES]) const {
    constexpr int STRIDE = CHUNK * SPAN + 16;  // elements; parts begin at different banks
    const int column = lane % 4;
#pragma unroll
    for (int done = 0; done < PIECES; done += CHUNK) {
#pragma unroll
      for (int e = 0; e < CHUNK * SPAN / ARK_LANES; ++e) {
        if (done * SPAN + e * ARK_LANES >= PART) break;
        ark_u16 part[3];
        ark_three_parts(v[done * SPAN / ARK_LANES + e], part);
#pragma unroll
        for (int n = 0; n < 3; ++n) xs[n * STRIDE + place(lane + e * ARK_LANES)] = part[n];
      }
      ark_warp_sync();
#pragma unroll
      for (int p = 0; p < CHUNK; ++p) {
        if (done + p >= PIECES) break;
        Input& input = to[done + p];
        ark_mfma_sums plain = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          const ark_u16* from =
              xs + (column < 3 ? column : 0) * STRIDE + p * SPAN + lane / 4 * OWN + s * 8;
          const ark_u32x4 piece = *reinterpret_cast<const ark_u32x4*>(from);
          input.steps[s] = column < 3 ? piece : ark_u32x4(0u);
          if constexpr (ZERO) plain = ark_mfma_add(input.steps[s], ark_u32x4(0x3f803f80u), plain);
        }
        if constexpr (ZERO) input.plain = plain[0] + plain[1] + plain[2];
      }
      ark_warp_sync();
    }
  }
};

// Sums products over a wave. own[i]: the lane's product of row lane % 4 of the i-th four rows.
// Lane l < 16 gets the sum of row l % 4 of four l / 4.
ARK_DEVICE float ark_codes_totals(const float (&own)[4], int lane) {
  const bool odd = (lane & 4) != 0, upper = (lane & 8) != 0;
  const float same = odd ? own[1] : own[0], far = odd ? own[3] : own[2];
  const float before = odd ? own[2] : own[1], after = odd ? own[0] : own[3];
  // Block b of four lanes of a row of 16 lanes gets four b: its own value, and those of the blocks
  // b - 1, b - 2 and b - 3, counted cyclically.
  float row = upper ? far : same;
  row += ark_row_move<0x124>(upper ? after : before);  // row_ror 4
  row += ark_row_move<0x128>(upper ? same : far);      // row_ror 8
  row += ark_row_move<0x12c>(upper ? before : after);  // row_ror 12
  const ark_mfma_sums zero = {0.0f, 0.0f, 0.0f, 0.0f};
  return __builtin_amdgcn_mfma_f32_16x16x4f32(1.0f, row, zero, 0, 0, 0)[0];
}

// Multiplies AHEAD groups of four rows, from group `four` on, and stores the wave's sums. MORE:
// true if the next AHEAD groups are loaded meanwhile.
template <int AHEAD, bool MORE, class CODES, int PIECES>
ARK_DEVICE void ark_codes_round(const CODES& codes, int four,
                                typename CODES::Piece (&ring)[AHEAD][PIECES],
                                const typename CODES::Input (&input)[PIECES], float* sums) {
#pragma unroll
  for (int begin = 0; begin < AHEAD; begin += 4) {
    float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int a = begin; a < begin + 4 && a < AHEAD; ++a) {
      dots[a - begin] = CODES::dot(ring[a], input);
      if constexpr (MORE) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) ring[a][p] = codes.load(four + AHEAD + a, p);
      }
    }
    const float sum = ark_codes_totals(dots, codes.lane);
    const int count = begin + 4 <= AHEAD ? 16 : AHEAD % 4 * 4;
    const int row = (four + begin) * 4 + codes.lane;
    if (codes.lane < count) sums[row * ARK_WARPS + ark_warp()] = sum;
  }
}

// After its last products of a task, the wave ARK_ASKER prefetches lines of the weights of the
// processor's next task, from the first one on that no wait has prefetched: ARK_ASKED_LAST loads of
// a dword, one line per lane. Memory would otherwise stand still until the next task begins. A task
// whose loads are all in flight at once needs more of them, since it multiplies for a larger part
// of its time.
constexpr int ARK_ASKER = ARK_WARPS - 2;
template <bool ONE_ROUND>
constexpr int ARK_ASKED_LAST = ONE_ROUND ? 8 : 4;

// The packet of a residual that an epilogue adds to row n, loaded without waiting for its value.
// Returns 0, which no packet is, for other epilogues.
template <class E>
ARK_DEVICE ark_u64 ark_residual_packet(ArkCtx&, const E&, int) {
  return 0u;
}
template <class O, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE ark_u64 ark_residual_packet(
    ArkCtx&, const ArkAddSums<O, ArkOperand<const ark_u64, S0, S1, S2, S3, SYSTEM>>& e, int n) {
  return ark_packet_load(ark_address(e.residual, 0, 0, 0, n), SYSTEM);
}

// Computes a linear layer of one input row for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1, at most ROWS rows. AHEAD: the number of groups of four rows of weights whose
// loads are in flight. Returns false if a wait has failed or the launch was aborted; the processor
// must then leave the loop.
template <class ROW, int ROWS, int AHEAD, int CHUNK, class X, class P, class E>
ARK_DEVICE bool ark_linear_matrix_codes(ArkCtx& c, const ArkTask& t, const unsigned char* bytes,
                                        X x, const P& prologue, E epilogue) {
  typedef ArkMatrixCodes<ROW> Codes;
  constexpr int K = ROW::COLUMNS, PIECES = Codes::PIECES, PART = Codes::PART;
  constexpr int EACH = PART / ARK_LANES, WIDTH = E::WIDTH;
  constexpr int MOST = (ROWS + 3) / 4, ROUNDS = (MOST + AHEAD - 1) / AHEAD;
  constexpr int OWN = (ROWS / WIDTH + ARK_THREADS - 1) / ARK_THREADS;  // of a thread
  constexpr int SPREAD = 3 * (CHUNK * Codes::SPAN + 16);               // a wave's, in elements
  float* sums = reinterpret_cast<float*>(ARK_SCRATCH(c));              // by row, wave
  float* red = sums + (ROUNDS * AHEAD + 3) / 4 * 16 * ARK_WARPS;
  const int lane = ark_lane(), warp = ark_warp();
  ark_u16* xs = reinterpret_cast<ark_u16*>(red + 2 * ARK_WARPS) + warp * SPREAD;
  const int first = t.coord[0], rows = t.coord[1] - first;
  const Codes codes{(const ark_global<char>*)bytes +
                        static_cast<ark_i64>(first) * static_cast<ark_i64>(sizeof(ROW)),
                    rows, lane, warp * PART + lane / 4 * Codes::OWN};
  float factors[EACH];
  if constexpr (P::norm) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int k = warp * PART + lane + e * ARK_LANES;
      factors[e] = ark_get(prologue.weight.p, ark_part_at<K, PART>(k));
    }
  }
  typename Codes::Piece ring[AHEAD][PIECES];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) ring[a][p] = codes.load(a, p);
  }
  ArkLines next{nullptr, 0};
  if (warp == ARK_ASKER) next = ark_next_lines(c, bytes);
  if (!ark_enter(c)) return false;
  ArkPartInput<K, EACH, PART, X> part{x, warp * PART};
  part.ask(c);
  const int own_row = ark_tid() * WIDTH < rows ? ark_tid() * WIDTH : 0;
  const ark_u64 residual = ark_residual_packet(c, epilogue, first + own_row);
  const float bias = ark_bias_ahead(c, epilogue, first + own_row);
  float ahead[OWN][1][WIDTH] = {}, scales[OWN][WIDTH];
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (E::WAITS && row < rows) {
      ark_sums_ahead(c, epilogue, 0, first + row, rows - row, ahead[o]);
    }
#pragma unroll
    for (int r = 0; r < WIDTH; ++r) {
      scales[o][r] = 1.0f;
      if constexpr (Codes::ONE) scales[o][r] = codes.scale(row + r < rows ? row + r : rows - 1);
    }
  }
  typename Codes::Input input[PIECES];
  float own = 0.0f;  // squares, of a lane
  part.take(c, ROWS * static_cast<int>(sizeof(ROW)) <= 65536 ? 1 : 4);
#pragma unroll
  for (int e = 0; P::norm && e < EACH; ++e) {
    own += part.v[e] * part.v[e];
    part.v[e] *= factors[e];
  }
  codes.template spread<CHUNK>(part.v, xs, input);
  const int fours = (rows + 3) / 4;
  int four = 0;
#pragma unroll 1
  for (; ROUNDS > 1 && four + AHEAD < fours; four += AHEAD) {
    ark_codes_round<AHEAD, true>(codes, four, ring, input, sums);
  }
  ark_codes_round<AHEAD, false>(codes, four, ring, input, sums);
  constexpr int LAST = ARK_ASKED_LAST<ROUNDS == 1>;
  ark_u32 asked[LAST] = {};
  if (warp == ARK_ASKER) {
    const int earlier = ark_asked_of_next(c);
#pragma unroll
    for (int i = 0; i < LAST; ++i) asked[i] = next.load(earlier + i * ARK_LANES + lane);
  }
  if constexpr (P::norm) {
    own = ark_warp_sum(own);
    if (lane == 0) red[warp] = own;
  }
  asm volatile("" ::"v"(bias));
  ark_sync();
  const float scale = ark_norm_factor<K>(prologue, red);
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row >= rows) continue;
    if (!E::WAITS) {
      if (o == 0 && ark_packet_ready(c, residual)) {
        ahead[o][0][0] = ark_bits_float(static_cast<ark_u32>(residual));
      } else {
        ark_sums_ahead(c, epilogue, 0, first + row, rows - row, ahead[o]);
      }
    }
    float total[WIDTH];
#pragma unroll
    for (int r = 0; r < WIDTH; ++r) {
      total[r] = 0.0f;
#pragma unroll
      for (int w = 0; w < ARK_WARPS; ++w) total[r] += sums[(row + r) * ARK_WARPS + w];
      total[r] *= scale * scales[o][r];
    }
    ark_sums_store(c, epilogue, 0, first + row, rows - row, total, ahead[o][0]);
  }
  if constexpr (P::norm) ark_sync();
  ark_sums_finish(c, t, epilogue, red);
  // There are always rows. So nothing waits for the prefetches, but the compiler keeps them.
#pragma unroll
  for (int i = 0; rows < 0 && i < LAST; ++i) asm volatile("" ::"v"(asked[i]));
  return true;
}
