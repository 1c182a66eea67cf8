// Linear layers of several input rows by matrix units. A 16 x 16 product multiplies 16 columns of
// the input with 16 rows of weights. With more than 8 input rows, the columns are 16 input rows and
// 16 rows of weights. With at most 8 input rows, they are 8 input rows and 8 rows of weights, each
// in two columns: one for each half of a chunk along k. Sums that combine different halves are not
// used. The weights are loaded only once for up to 16 input rows. The chunks along k are assigned
// round-robin to the eight waves, for all the task's rows of weights. A wave loads the input's
// elements of its chunks from memory and splits each into three parts of 8 bits of the significand,
// whose sum is exactly the element. The waves synchronise to add up the sums of each group of rows.

// Adds one product over 32 elements of k. Operands: a lane has eight elements along k of column
// lane % 16 of the input (x), and the same eight elements of row lane % 16 of the weights (w).
// Results: a lane has the sums of its row of weights with the four columns from lane / 16 * 4 on.
ARK_DEVICE ark_mfma_sums ark_mfma_step(ark_u32x4 x, ark_u32x4 w, ark_mfma_sums sums) {
#if defined(__gfx950__)
  typedef __bf16 Eight __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Eight, x),
                                                 __builtin_bit_cast(Eight, w), sums, 0, 0, 0);
#else
  struct Halves {
    ark_mfma_pack low, high;
  };
  const Halves a = __builtin_bit_cast(Halves, x), b = __builtin_bit_cast(Halves, w);
  sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.low, b.low, sums, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.high, b.high, sums, 0, 0, 0);
#endif
}

// The weights of a linear layer with bf16 weights. ROWS: the number of rows of weights in a
// product, 8 or 16; a product has at most as many input rows. lane: the reading lane. STEPS: the
// products of a chunk. MOST: the most blocks of rows and chunks whose loads are in flight.
// ROW_BYTES: the bytes of a row. NEXT: the number of 128-byte lines of the next task's weights that
// each lane prefetches. place(s): the position in a chunk of a lane's first element of step s (one
// product). order(e): the index, among the lane's eight elements of a step, of the element at
// position e of the operand. SCALES: the number of groups of a chunk whose sums have a scale each.
// ZEROS: true if each group also has a zero point, which is subtracted from all its elements.
template <int K, int R>
struct ArkSeveralDense {
  static constexpr int ROWS = R, STEPS = ark_chunk_steps(K, R), SCALES = 0, NEXT = 0;
  static constexpr int MOST = 16 / STEPS, ROW_BYTES = 2 * K, EARLY = 8 / STEPS;
  static constexpr bool ZEROS = false;
  struct Piece {
    ark_u32x4 words[STEPS];
  };
  const ark_global<char>* bytes;
  int rows;
  int lane;

  ARK_METHOD int place(int s, int half) const {
    return s * ark_chunk_span(ROWS, 1) + half * ARK_STEP + lane / 16 * 8;
  }
  ARK_METHOD int place(int s) const { return place(s, ROWS == 8 ? lane / 8 % 2 : 0); }
  static constexpr int order(int e) { return e; }
  // Past the last row or the row's end, existing data is loaded again instead of skipping the load.
  // With a branch, the compiler could not count the loads in flight, and the next wait would be for
  // all of them.
  ARK_METHOD Piece load(int top, int chunk) const {
    const int row = top + lane % ROWS < rows ? top + lane % ROWS : rows - 1;
    Piece piece;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = ark_chunk_at<K, ArkSeveralDense>(chunk, place(s));
      const ark_u32 at = static_cast<ark_u32>(row * K + k) * 2u;
      piece.words[s] = __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(bytes + at));
    }
    return piece;
  }
  ARK_DEVICE ark_u32x4 step(const Piece& piece, int s) { return piece.words[s]; }
};

// The largest divisor of `chunks`, a wave's number of chunks, that is at most `most`.
constexpr int ark_several_ahead(int chunks, int most) {
  while (chunks % most != 0) --most;
  return most;
}

// Adds the products of step s of a chunk of the input and a block of rows of weights to `sums`.
// Each input element is a sum of PARTS numbers of the weights' type; parts[p]: number p of each of
// the lane's elements. inside: true if these elements are within the row.
template <class W, int PARTS>
ARK_DEVICE void ark_several_step(const ark_u32x4 (&parts)[PARTS], bool inside, int s,
                                 const typename W::Piece& piece, ark_mfma_sums& sums) {
  const ark_u32x4 there = W::step(piece, s), row = inside ? there : ark_u32x4(0u);
#pragma unroll
  for (int p = 0; p < PARTS; ++p) sums = ark_mfma_step(parts[p], row, sums);
}

// Adds the products of a chunk and a block of quantised weights. Each group of elements has a
// scale. The products of a group are summed separately and then multiplied by the group's scale.
// plain: the sums of the input's elements, if groups have zero points.
template <class W, int PARTS>
ARK_DEVICE void ark_several_scaled(const ark_u32x4 (&parts)[W::STEPS][PARTS],
                                   const ark_mfma_sums (&plain)[W::SCALES + 1],
                                   const typename W::Piece& piece, ark_mfma_sums& sums) {
  constexpr int EACH = W::STEPS / W::SCALES;
#pragma unroll
  for (int i = 0; i < W::SCALES; ++i) {
    ark_mfma_sums own = 0.0f;
#pragma unroll
    for (int s = i * EACH; s < i * EACH + EACH; ++s) {
      const ark_u32x4 row = W::step(piece, s);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) own = ark_mfma_step(parts[s][p], row, own);
    }
    if constexpr (W::ZEROS) own -= W::zero(piece, i) * plain[i];
    sums += W::scale(piece, i) * own;
  }
}
template <class W, int PARTS>
ARK_DEVICE void ark_several_plain(const ark_u32x4 (&parts)[W::STEPS][PARTS],
                                  ark_mfma_sums (&plain)[W::SCALES + 1]) {
  constexpr int EACH = W::STEPS / W::SCALES;
  const ark_u32x4 ones = 0x3f803f80u;
#pragma unroll
  for (int s = 0; s < W::STEPS; ++s) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      plain[s / EACH] = ark_mfma_step(parts[s][p], ones, plain[s / EACH]);
    }
  }
}

// Computes one output of a layer with bf16 weights without matrix units.
template <class W, int K, class X, class P>
ARK_DEVICE float ark_several_plain_dot(ArkCtx& c, const W& weights, int row, const X& x, int m,
                                       const P& prologue) {
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    float v = ark_load(c, x, 0, 0, m, k);
    if constexpr (P::norm) v *= ark_get(prologue.weight.p, k);
    const ark_u32 at = static_cast<ark_u32>(row * K + k) * 2u;
    const ark_u32 bits = *(const ark_global<unsigned short>*)(weights.bytes + at);
    sum += v * ark_bits_float(bits << 16);
  }
  return sum;
}

// The first cache lines of the weights of the processor's next task with weights. While the current
// task multiplies, it prefetches these lines (by loading a dword of each), so that memory does not
// idle.
struct ArkNextLines {
  const ark_global<char>* from;
  int lines;
};
template <class W>
ARK_DEVICE ArkNextLines ark_next_lines(ArkCtx& c, const W& weights) {
  const ArkNextLines own = {weights.bytes, 1};  // a line that exists
  if constexpr (W::NEXT == 0) return own;
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
  const auto* tasks = ARK_POINTER(const ArkTask, ARK_PARAMS(c)->tasks);
  for (ark_u32 ahead = 1u; ahead <= ARK_ASKED_TASKS && running + ahead < c.task_end; ++ahead) {
    const ArkTask& next = tasks[running + ahead];
    const ark_u32 stages = next.fetch_end - next.fetch_begin;
    if (stages == 0u) continue;
    const ArkFetch& fetch = ark_fetch(c, next.fetch_begin);
    const int lines = static_cast<int>(stages * fetch.bytes / 128u);
    if (fetch.form == 0u && lines > 0) return {(const ark_global<char>*)fetch.address, lines};
  }
  return own;
}

// Computes a linear layer of M input rows for some rows of the weights. Task coordinates: first row
// of the weights and end of the rows. A wave multiplies GROUP blocks of W::ROWS rows of weights at
// a time. When it begins a chunk, the loads of the first SLOTS blocks are in flight. ONCE: true if
// no task has more than GROUP blocks. ENTERS: true if this function performs the task's waits,
// false if the caller has. Returns false if a wait has failed or the launch was aborted; the
// processor must then leave the loop.
template <class W, int K, int M, int GROUP, bool ONCE, bool ALIGNED, bool ENTERS, class X, class P,
          class E>
ARK_DEVICE bool ark_linear_several(ArkCtx& c, const ArkTask& t, const W& weights, X x,
                                   const P& prologue, E epilogue) {
  constexpr int ROWS = W::ROWS, HALVES = 16 / ROWS, STEPS = W::STEPS;
  constexpr int SPAN = ark_chunk_span(ROWS, STEPS);
  static_assert(M <= ROWS, "a product has this many input rows");
  constexpr int CHUNKS = ((K + SPAN - 1) / SPAN + ARK_WARPS - 1) / ARK_WARPS;
  constexpr int SLOTS = GROUP < W::MOST ? GROUP : W::MOST < 4 ? W::MOST : 4;
  // With at most 8 chunks the loop over them is unrolled completely, so that any number of chunks
  // can be in flight.
  constexpr int ROUND = CHUNKS <= 8 ? CHUNKS : ark_several_ahead(CHUNKS, W::MOST / SLOTS);
  constexpr int AHEAD = ROUND < W::MOST / SLOTS ? ROUND : W::MOST / SLOTS;
  // Chunks of the input in flight. A chunk has the same slot in each round.
  constexpr int INPUTS = AHEAD < 2 || (ROUND != CHUNKS && ROUND % 2 != 0) ? 1 : 2;
  constexpr int WIDTH = E::WIDTH, TALL = GROUP * ROWS, PITCH = TALL + ROWS / 4;
  static_assert(ROUND % AHEAD == 0 || ROUND == CHUNKS, "a chunk has the same slot in each round");
  // Blocks whose products are computed while the input is converted, so that vector and matrix
  // units work at the same time. Their weights are loaded first.
  constexpr int MIXED = W::SCALES > 0 ? 0 : SLOTS < W::EARLY ? SLOTS : W::EARLY;
  constexpr int EARLY = GROUP > 4 && W::SCALES == 0 ? W::EARLY * 3 / 2 : W::EARLY;
  constexpr bool RAGGED = K % (SPAN * ARK_WARPS) != 0;
  typedef ArkSeveralInput<X, ALIGNED, STEPS> Input;
  constexpr int PARTS = Input::BF16 && !P::norm ? 1 : 3;
  constexpr int UNITS = TALL / WIDTH, OWN = (UNITS * M + ARK_THREADS - 1) / ARK_THREADS;
  float* slab = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by wave, column, row of weights
  float* red = slab + ARK_WARPS * 16 * PITCH;              // squares by wave, input row
  // The compiler computes what depends on ark_tid() anew for each call of it.
  const int lane = weights.lane, warp = ark_warp(), tid = ark_tid();
  const int first = t.coord[0], rows = t.coord[1] - first;
  const int m = lane % ROWS < M ? lane % ROWS : M - 1;
  typename W::Piece ring[AHEAD][SLOTS];
  const auto fill = [&](bool early) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
      for (int g = 0; g < SLOTS; ++g) {
        if ((!ONCE || a * SLOTS + g < EARLY) != early) continue;
        ring[a][g] = weights.load(g * ROWS, warp + a * ARK_WARPS);
      }
    }
  };
  // The places of this thread's sums. The empty statement makes the compiler compute them before
  // the wait.
  int row_at[OWN], column_at[OWN];
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    row_at[o] = (tid + o * ARK_THREADS) % UNITS * WIDTH;
    column_at[o] = (tid + o * ARK_THREADS) / UNITS;
    asm volatile("" : "+v"(row_at[o]), "+v"(column_at[o]));
  }
  const bool ready = ENTERS && ark_poll_first(c);
  fill(true);
  const ArkNextLines next = ark_next_lines(c, weights);
  // The lines of the first blocks, if their loads are all in flight.
  constexpr int LINES = AHEAD < CHUNKS ? 0 : SLOTS * ROWS * W::ROW_BYTES / 128;
  if (ENTERS && !ark_enter_prefetching(c, ready, LINES)) return false;
  ark_u32 asked[W::NEXT + 1] = {};
#pragma unroll 1
  for (int top = 0; top < rows; top += TALL) {
    ark_mfma_sums sums[GROUP] = {};
    float own = 0.0f;  // the lane's sum of squares
    Input input[INPUTS];
    ArkSeveralFactors<P, STEPS> factors[INPUTS];
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) {
      factors[i].template ask<K>(prologue, warp + i * ARK_WARPS, weights);
      input[i].template ask<K>(c, x, m, warp + i * ARK_WARPS, weights);
    }
    // The input's loads come first, because loads return in order.
    __builtin_amdgcn_sched_barrier(0);
    if (ONCE) fill(false);
    __builtin_amdgcn_sched_barrier(0);
#pragma unroll 1
    for (int round = 0; round < CHUNKS; round += ROUND) {
#pragma unroll
      for (int a = 0; a < ROUND; ++a) {
        const int chunk = warp + (round + a) * ARK_WARPS;
        bool inside[STEPS];
        ark_u32x4 parts[STEPS][PARTS];
        float most = 0.0f;
        typename W::Piece(&pieces)[SLOTS] = ring[a % AHEAD];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          inside[s] = !RAGGED || chunk * SPAN + weights.place(s) < K;
          float v[8];
          input[a % INPUTS].take(s, weights, v);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (!inside[s]) v[e] = 0.0f;
            if constexpr (P::norm) {
              own += v[e] * v[e];
              v[e] *= factors[a % INPUTS].at(s, e);
            }
            if (MIXED == 0) most = __builtin_fmaxf(most, __builtin_fabsf(v[e]));
          }
          ark_several_parts<W>(v, parts[s]);
#pragma unroll
          for (int g = 0; g < MIXED; ++g) {
            ark_several_step<W>(parts[s], inside[s], s, pieces[g], sums[g]);
          }
          if (MIXED == 0) __builtin_amdgcn_sched_barrier(0);
        }
        if (PARTS > 1 && MIXED == 0 && ark_ballot(most == ark_inf()) != 0u) {
#pragma unroll
          for (int s = 0; s < STEPS; ++s) ark_several_infinite(parts[s]);
        }
        // Elements of the input for a later chunk are loaded while these are multiplied.
        if (ROUND < CHUNKS || a + INPUTS < CHUNKS) {
          factors[a % INPUTS].template ask<K>(prologue, chunk + INPUTS * ARK_WARPS, weights);
          input[a % INPUTS].template ask<K>(c, x, m, chunk + INPUTS * ARK_WARPS, weights);
        }
        if (W::NEXT > 0 && top == 0 && round == 0 && a == 0) {
#pragma unroll
          for (int i = 0; i < W::NEXT; ++i) {
            const int at = i * ARK_THREADS + tid, line = at < next.lines ? at : 0;
            asked[i] = *(const ark_global<ark_u32>*)(next.from + line * 128);
          }
        }
        ark_mfma_sums plain[W::SCALES + 1] = {};
        if constexpr (W::ZEROS) ark_several_plain<W>(parts, plain);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          typename W::Piece& piece = pieces[g % SLOTS];
          if constexpr (W::SCALES > 0) {
            ark_several_scaled<W>(parts, plain, piece, sums[g]);
          } else if (g >= MIXED) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
              ark_several_step<W>(parts[s], inside[s], s, piece, sums[g]);
            }
          }
          if (g + SLOTS < GROUP) piece = weights.load(top + (g + SLOTS) * ROWS, chunk);
          // Otherwise the compiler delays loads to save registers, and they are waited for.
          __builtin_amdgcn_sched_barrier(0);
        }
        const bool last = round + a + AHEAD >= CHUNKS;
        if (last && (ONCE || top + TALL >= rows)) continue;
        const int later = last ? warp + a % AHEAD * ARK_WARPS : chunk + AHEAD * ARK_WARPS;
#pragma unroll
        for (int g = 0; g < SLOTS; ++g) {
          pieces[g] = weights.load(top + (last ? TALL : 0) + g * ROWS, later);
        }
      }
    }
    float ahead[OWN][1][WIDTH] = {};
    const auto row_of = [&](int o) { return top + row_at[o]; };
    const auto input_row = [&](int o) { return column_at[o]; };
    const auto stored = [&](int o) { return input_row(o) < M && row_of(o) < rows; };
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
      if (!stored(o)) continue;
      ark_sums_ahead(c, epilogue, input_row(o), first + row_of(o), rows - row_of(o), ahead[o]);
    }
    // With 8 rows, a lane's sums are used only if its row of weights and its columns of the input
    // belong to the same half of the chunk.
    const int half = lane / 8 % 2, column = warp * 16 + lane / 16 * 4;
    if (ROWS == 16 || half == lane / 32) {
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          slab[(column + i) * PITCH + g * ROWS + lane % ROWS] = sums[g][i];
        }
      }
    }
    if constexpr (P::norm) {
      if constexpr (ROWS == 8) own += ark_row_move<0x128>(own);
      own += ark_shfl_xor(own, 16);
      own += ark_shfl_xor(own, 32);
      if (lane < 16) red[warp * 16 + lane] = own;
    }
    ark_sync();
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
      if (!stored(o)) continue;
      float scale = 1.0f, total[WIDTH];
      if constexpr (P::norm) {
        float squares = 0.0f;
#pragma unroll
        for (int w = 0; w < ARK_WARPS; ++w) squares += red[w * 16 + input_row(o)];
        scale = ark_rsqrt(squares / K + prologue.eps);
      }
#pragma unroll
      for (int r = 0; r < WIDTH; ++r) {
        total[r] = 0.0f;
#pragma unroll
        for (int w = 0; w < ARK_WARPS * HALVES; ++w) {
          total[r] += slab[(w * ROWS + input_row(o)) * PITCH + row_of(o) - top + r];
        }
        // The second part of an infinite element is NaN.
        if (PARTS > 1 && MIXED > 0 && total[r] != total[r]) {
          const int weight_row = row_of(o) + r < rows ? row_of(o) + r : rows - 1;
          total[r] = ark_several_plain_dot<W, K>(c, weights, weight_row, x, input_row(o), prologue);
        }
        total[r] *= scale;
      }
      const int row = row_of(o);
      ark_sums_store(c, epilogue, input_row(o), first + row, rows - row, total, ahead[o][0]);
    }
    if (ONCE) break;
    ark_sync();
  }
  if (ENTERS) ark_signal_early(c);
#pragma unroll
  for (int i = 0; i < W::NEXT; ++i) asm volatile("" ::"v"(asked[i]));
  return true;
}
