// Linear layers of several input rows by matrix units. A 16 x 16 product multiplies 16 input rows
// by 16 rows of weights, so the weights are loaded only once for 16 input rows. Rows are cut along
// k into chunks of 128 elements. The chunks are assigned round-robin to the eight waves, for all of
// the task's rows of weights. A wave loads the input's elements of its chunks from memory and
// splits each element into three parts of 8 bits of the significand, whose sum is exactly the
// element. The waves synchronise to add up the sums of each group of rows.

// Adds one product of 16 input rows with 16 rows of weights over 32 elements of k. x: this lane's
// eight elements along k of input row lane % 16. w: the same eight elements of row lane % 16 of the
// weights. Result: the lane's sums of its row of weights with the four input rows from lane / 16 *
// 4 on.
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

// The weights of a linear layer if they are bf16. lane: the reading lane. MOST: the most loads of a
// chunk in flight. NEXT: the number of 128-byte lines of the next task's weights that each lane
// prefetches. place(s): the index, in a chunk, of a lane's first element of step s. order(e): which
// of the lane's eight elements is at position e of the operand. SCALES: the number of groups of a
// chunk that have a scale each. ZEROS: true if each group also has a zero point, which is
// subtracted from all its elements.
template <int K>
struct ArkSeveralDense {
  static constexpr int MOST = 4, SCALES = 0, NEXT = 0;
  static constexpr bool ZEROS = false;
  struct Piece {
    ark_u32x4 words[ARK_CHUNK_STEPS];
  };
  const ark_global<char>* bytes;
  int rows;
  int lane;

  ARK_METHOD int place(int s) const { return s * 32 + lane / 16 * 8; }
  static constexpr int order(int e) { return e; }
  // Past the last row or the row's end, existing data is loaded again. A branch that skips the load
  // would make the next wait a wait for all loads in flight.
  ARK_METHOD Piece load(int top, int chunk) const {
    const int row = top + lane % 16 < rows ? top + lane % 16 : rows - 1;
    Piece piece;
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const ark_u32 at = static_cast<ark_u32>(row * K + ark_chunk_at<K>(chunk, place(s))) * 2u;
      piece.words[s] = __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(bytes + at));
    }
    return piece;
  }
  ARK_DEVICE ark_u32x4 step(const Piece& piece, int s) { return piece.words[s]; }
};

// The largest divisor of a wave's number of chunks that does not exceed `most`. It is the number of
// chunks in flight.
constexpr int ark_several_ahead(int chunks, int most) {
  while (chunks % most != 0) --most;
  return most;
}

// Adds the products of a chunk whose weights have scales. Each group is summed separately and then
// multiplied by its scale.
template <class W, int PARTS, int GROUP>
ARK_DEVICE void ark_several_scaled(const ark_u32x4 (&parts)[ARK_CHUNK_STEPS][PARTS],
                                   const typename W::Piece (&pieces)[GROUP],
                                   ark_mfma_sums (&sums)[GROUP]) {
  constexpr int EACH = ARK_CHUNK_STEPS / W::SCALES;
  const ark_u32x4 ones = 0x3f803f80u;
#pragma unroll
  for (int i = 0; i < W::SCALES; ++i) {
    ark_mfma_sums plain = 0.0f;  // of the input's elements
#pragma unroll
    for (int s = i * EACH; W::ZEROS && s < i * EACH + EACH; ++s) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) plain = ark_mfma_step(parts[s][p], ones, plain);
    }
    ark_mfma_sums own[GROUP] = {};
#pragma unroll
    for (int s = i * EACH; s < i * EACH + EACH; ++s) {
      ark_u32x4 row[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) row[g] = W::step(pieces[g], s);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) own[g] = ark_mfma_step(parts[s][p], row[g], own[g]);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      if constexpr (W::ZEROS) own[g] -= W::zero(pieces[g], i) * plain;
      sums[g] += W::scale(pieces[g], i) * own[g];
    }
  }
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
  const ArkNextLines own = {weights.bytes, 1};  // that are there
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

// Computes a linear layer of M input rows for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1. A wave multiplies GROUP blocks of 16 rows of weights at a time. ENTERS: true if
// this function performs the task's waits, false if the caller has done so. Returns false if a wait
// has failed or the launch was aborted; the processor must then leave the loop.
template <class W, int K, int M, int GROUP, bool ALIGNED, bool ENTERS, class X, class P, class E>
ARK_DEVICE bool ark_linear_several(ArkCtx& c, const ArkTask& t, const W& weights, X x,
                                   const P& prologue, E epilogue) {
  static_assert(M <= 16, "a product has 16 input rows");
  constexpr int CHUNKS = ((K + ARK_CHUNK - 1) / ARK_CHUNK + ARK_WARPS - 1) / ARK_WARPS;
  constexpr int AHEAD = ark_several_ahead(CHUNKS, GROUP >= W::MOST ? 1 : W::MOST / GROUP);
  constexpr int EACH = M <= 8 ? 4 : 8, WIDTH = E::WIDTH, PITCH = 20;
  constexpr int INPUTS = ark_several_ahead(AHEAD, 16 / EACH);  // chunks of the input in flight
  constexpr bool RAGGED = K % (ARK_CHUNK * ARK_WARPS) != 0;
  typedef ArkSeveralInput<X, EACH, ALIGNED> Input;
  constexpr int PARTS = Input::BF16 && !P::norm ? 1 : 3;
  constexpr int UNITS = GROUP * 16 / WIDTH, OWN = (UNITS * M + ARK_THREADS - 1) / ARK_THREADS;
  float* slab = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by wave, row, input row
  float* red = slab + ARK_WARPS * GROUP * 16 * PITCH;      // squares by wave, input row
  const int lane = weights.lane, warp = ark_warp();
  const int first = t.coord[0], rows = t.coord[1] - first;
  const int own_row = EACH == 4 ? lane % 8 : lane % 16, m = own_row < M ? own_row : M - 1;
  typename W::Piece ring[AHEAD][GROUP];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) ring[a][g] = weights.load(g * 16, warp + a * ARK_WARPS);
  }
  const ArkNextLines next = ark_next_lines(c, weights);
  if (ENTERS && !ark_enter(c)) return false;
  ark_u32 asked[W::NEXT + 1] = {};
#pragma unroll 1
  for (int top = 0; top < rows; top += GROUP * 16) {
    ark_mfma_sums sums[GROUP] = {};
    float own = 0.0f;  // squares, of a lane
    Input input[INPUTS];
    ArkSeveralFactors<P, EACH> factors[INPUTS];
#pragma unroll
    for (int i = 0; i < INPUTS; ++i) {
      factors[i].template ask<K>(prologue, warp + i * ARK_WARPS, weights);
      input[i].template ask<K>(c, x, m, warp + i * ARK_WARPS, weights);
    }
#pragma unroll 1
    for (int round = 0; round < CHUNKS; round += AHEAD) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int chunk = warp + (round + a) * ARK_WARPS;
        bool inside[ARK_CHUNK_STEPS];
        float v[ARK_CHUNK_STEPS][EACH];
#pragma unroll
        for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
          inside[s] = !RAGGED || chunk * ARK_CHUNK + weights.place(s) < K;
          input[a % INPUTS].take(s, v[s]);
#pragma unroll
          for (int e = 0; e < EACH; ++e) {
            if (!inside[s]) v[s][e] = 0.0f;
            if constexpr (P::norm) {
              own += v[s][e] * v[s][e];
              v[s][e] *= factors[a % INPUTS].at(s, e);
            }
          }
        }
        ark_u32x4 parts[ARK_CHUNK_STEPS][PARTS];
        ark_several_parts<W>(v, parts);
        // The input's elements for a later chunk are loaded while the current chunk is multiplied.
        factors[a % INPUTS].template ask<K>(prologue, chunk + INPUTS * ARK_WARPS, weights);
        input[a % INPUTS].template ask<K>(c, x, m, chunk + INPUTS * ARK_WARPS, weights);
        if (W::NEXT > 0 && top == 0 && round == 0 && a == 0) {
#pragma unroll
          for (int i = 0; i < W::NEXT; ++i) {
            const int at = i * ARK_THREADS + ark_tid(), line = at < next.lines ? at : 0;
            asked[i] = *(const ark_global<ark_u32>*)(next.from + line * 128);
          }
        }
        if constexpr (W::SCALES > 0) {
          ark_several_scaled<W>(parts, ring[a], sums);
        } else {
#pragma unroll
          for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
              const ark_u32x4 there = W::step(ring[a][g], s);
              const ark_u32x4 row = inside[s] ? there : ark_u32x4(0u);
#pragma unroll
              for (int p = 0; p < PARTS; ++p) sums[g] = ark_mfma_step(parts[s][p], row, sums[g]);
            }
          }
        }
        const bool last = round + a + AHEAD >= CHUNKS;
        const int next_chunk =
            last ? chunk - (CHUNKS - AHEAD) * ARK_WARPS : chunk + AHEAD * ARK_WARPS;
        if (last && top + GROUP * 16 >= rows) continue;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          ring[a][g] = weights.load(top + (last ? GROUP * 16 : 0) + g * 16, next_chunk);
        }
      }
    }
    float ahead[OWN][1][WIDTH] = {};
    const auto place = [&](int o) { return ark_tid() + o * ARK_THREADS; };
    const auto row_of = [&](int o) { return top + place(o) % UNITS * WIDTH; };
    const auto input_row = [&](int o) { return place(o) / UNITS; };
    const auto stored = [&](int o) { return input_row(o) < M && row_of(o) < rows; };
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
      if (!stored(o)) continue;
      ark_sums_ahead(c, epilogue, input_row(o), first + row_of(o), rows - row_of(o), ahead[o]);
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const int row = (warp * GROUP + g) * 16 + lane % 16;
      *reinterpret_cast<ark_mfma_sums*>(slab + row * PITCH + lane / 16 * 4) = sums[g];
    }
    if constexpr (P::norm) {
      if constexpr (EACH == 4) own += ark_row_move<0x128>(own);
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
        for (int w = 0; w < ARK_WARPS; ++w) {
          const int row = w * GROUP * 16 + row_of(o) - top + r;
          total[r] += slab[row * PITCH + input_row(o)];
        }
        total[r] *= scale;
      }
      const int row = row_of(o);
      ark_sums_store(c, epilogue, input_row(o), first + row, rows - row, total, ahead[o][0]);
    }
    ark_sync();
  }
#pragma unroll
  for (int i = 0; i < W::NEXT; ++i) asm volatile("" ::"v"(asked[i]));
  return true;
}
