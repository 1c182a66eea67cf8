// Linear layers of several input rows by matrix units: products of 16 x 16 have an input row and a
// row of weights, so that 16 of them take the weights' loads once, as one row does. A wave has every
// eighth chunk of 128 elements along k of all the task's rows of weights. It reads the input's
// elements of its chunks from memory and splits them into three parts of 8 bits of the significand,
// whose sum is the input exactly; the waves meet for the sums of each group of rows.

constexpr int ARK_CHUNK = 128, ARK_CHUNK_STEPS = 4;  // elements along k, and products of 32 of them

// One product of 16 x 16 x 32: a lane has input row, or row of weights, lane % 16 and the same eight
// elements along k of both sides; and the sums of input rows lane / 16 * 4 and on with its weights.
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

// Weights of bf16. MOST: loads of a chunk under way. place(s): of a lane's first element of step s
// in a chunk; order(e): which of its eight elements is at place e. SCALES: groups of a chunk whose
// sums have a scale each, and with ZEROS one zero, which all their elements are too large by.
template <int K>
struct ArkSeveralDense {
  static constexpr int MOST = 4, SCALES = 0;
  static constexpr bool ZEROS = false;
  struct Piece {
    ark_u32x4 words[ARK_CHUNK_STEPS];
  };
  const ark_global<char>* bytes;
  int rows;

  ARK_DEVICE int place(int s) { return s * 32 + ark_lane() / 16 * 8; }
  static constexpr int order(int e) { return e; }
  // Beyond the last row, or the row's end, something that is there comes again: a load must not
  // depend on a branch.
  ARK_METHOD Piece load(int top, int chunk) const {
    const int row = top + ark_lane() % 16 < rows ? top + ark_lane() % 16 : rows - 1;
    Piece piece;
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int k = chunk * ARK_CHUNK + place(s);
      const ark_u32 at = (static_cast<ark_u32>(row) * K + (k < K ? k : 0)) * 2u;
      piece.words[s] = __builtin_nontemporal_load((const ark_global<ark_u32x4>*)(bytes + at));
    }
    return piece;
  }
  ARK_DEVICE ark_u32x4 step(const Piece& piece, int s) { return piece.words[s]; }
};

// Eight floats of the input as the products take them, in their parts of 8 bits.
template <class W, int PARTS>
ARK_DEVICE void ark_several_parts(const float (&v)[8], ark_u32x4 (&to)[PARTS]) {
  ark_u16 part[8][3];
#pragma unroll
  for (int e = 0; e < 8; ++e) ark_three_parts(v[W::order(e)], part[e]);
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      to[p][e / 2] = static_cast<ark_u32>(part[e][p]) | static_cast<ark_u32>(part[e + 1][p]) << 16;
    }
  }
}

// A lane's elements of a chunk of the input, of column lane % 16: asked for, then taken. ALIGNED:
// rows begin at multiples of 16 bytes and their elements lie side by side.
template <class X, bool ALIGNED>
struct ArkSeveralInput {
  static constexpr bool BF16 = false;
  float v[ARK_CHUNK_STEPS][8];

  template <class W>
  ARK_METHOD void ask(ArkCtx& c, const X& x, int m, int chunk, int k_end) {
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int k = chunk * ARK_CHUNK + W::place(s);
#pragma unroll
      for (int e = 0; e < 8; ++e) v[s][e] = ark_load(c, x, 0, 0, m, k < k_end ? k + e : e);
    }
  }
  ARK_METHOD void take(int s, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e] = v[s][e];
  }
};
template <ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkSeveralInput<ArkOperand<const float, S0, S1, S2, S3, SYSTEM>, true> {
  static constexpr bool BF16 = false;
  ark_f32x4 v[ARK_CHUNK_STEPS][2];

  template <class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const float, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, int k_end) {
    const auto* row = (const ark_global<float>*)ark_address(x, 0, 0, m, 0);
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int k = chunk * ARK_CHUNK + W::place(s);
      const auto* from = (const ark_global<ark_f32x4>*)(row + (k < k_end ? k : 0));
      v[s][0] = from[0];
      v[s][1] = from[1];
    }
  }
  ARK_METHOD void take(int s, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e] = v[s][e / 4][e % 4];
  }
};
template <ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkSeveralInput<ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>, true> {
  static constexpr bool BF16 = true;
  ark_u32x4 v[ARK_CHUNK_STEPS];

  template <class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, int k_end) {
    const auto* row = (const ark_global<ark_bf16>*)ark_address(x, 0, 0, m, 0);
#pragma unroll
    for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
      const int k = chunk * ARK_CHUNK + W::place(s);
      v[s] = *(const ark_global<ark_u32x4>*)(row + (k < k_end ? k : 0));
    }
  }
  ARK_METHOD void take(int s, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const ark_u32 pair = v[s][e / 2];
      to[e] = ark_bits_float(e % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
  }
};

// The widest count of chunks that are under way at once: a divisor of a wave's chunks.
constexpr int ark_several_ahead(int chunks, int most) {
  while (chunks % most != 0) --most;
  return most;
}

// Adds a chunk's products with weights that have scales: each group's are summed apart.
// begin: of the chunk.
template <class W, int K, int PARTS, int GROUP, class F>
ARK_DEVICE void ark_several_scaled(int begin, const ark_u32x4 (&parts)[ARK_CHUNK_STEPS][PARTS],
                                   const typename W::Piece (&pieces)[GROUP], const F& sums_of) {
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
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      ark_mfma_sums own = 0.0f;
#pragma unroll
      for (int s = i * EACH; s < i * EACH + EACH; ++s) {
        const ark_u32x4 there = W::step(pieces[g], s);
        const ark_u32x4 row = !W::TORN || begin + W::place(s) < K ? there : ark_u32x4(0u);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) own = ark_mfma_step(parts[s][p], row, own);
      }
      if constexpr (W::ZEROS) own -= W::zero(pieces[g], i) * plain;
      sums_of(g) += W::scale(pieces[g], i) * own;
    }
  }
}

// coord: first and last+1 row of the weights. M rows of input; a wave multiplies GROUP blocks of 16
// rows of weights at once. False if the processor is to leave.
template <class W, int K, int M, int GROUP, bool ALIGNED, class X, class P, class E>
ARK_DEVICE bool ark_linear_several(ArkCtx& c, const ArkTask& t, const W& weights, X x,
                                   const P& prologue, E epilogue) {
  constexpr int CHUNKS = ((K + ARK_CHUNK - 1) / ARK_CHUNK + ARK_WARPS - 1) / ARK_WARPS;
  constexpr int AHEAD = ark_several_ahead(CHUNKS, GROUP >= W::MOST ? 1 : W::MOST / GROUP);
  constexpr int COLUMNS = (M + 15) / 16, WIDTH = E::WIDTH, PITCH = 20;
  constexpr bool RAGGED = K % (ARK_CHUNK * ARK_WARPS) != 0;
  typedef ArkSeveralInput<X, ALIGNED> Input;
  constexpr int PARTS = Input::BF16 && !P::norm ? 1 : 3;
  constexpr int UNITS = GROUP * 16 / WIDTH, OWN = (UNITS * 16 + ARK_THREADS - 1) / ARK_THREADS;
  float* slab = reinterpret_cast<float*>(ARK_SCRATCH(c));  // by wave, row, column
  float* red = slab + ARK_WARPS * GROUP * 16 * PITCH;      // squares by wave, column
  const int lane = ark_lane(), warp = ark_warp();
  const int first = t.coord[0], rows = t.coord[1] - first;
  typename W::Piece ring[AHEAD][GROUP];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) ring[a][g] = weights.load(g * 16, warp + a * ARK_WARPS);
  }
  if (!ark_enter(c)) return false;
#pragma unroll 1
  for (int top = 0; top < rows; top += GROUP * 16) {
    ark_mfma_sums sums[GROUP][COLUMNS];
    float own[COLUMNS];  // squares, of a lane
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      own[j] = 0.0f;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) sums[g][j] = 0.0f;
    }
    const auto column = [&](int j) { return j * 16 + lane % 16 < M ? j * 16 + lane % 16 : M - 1; };
    Input input;
    input.template ask<W>(c, x, column(0), warp, K);
#pragma unroll 1
    for (int round = 0; round < CHUNKS; round += AHEAD) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int chunk = warp + (round + a) * ARK_WARPS;
        float factors[ARK_CHUNK_STEPS][8];
        if constexpr (P::norm) {
#pragma unroll
          for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
            const int k = chunk * ARK_CHUNK + W::place(s);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              factors[s][e] = ark_get(prologue.weight.p, k < K ? k + e : e);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          ark_u32x4 parts[ARK_CHUNK_STEPS][PARTS];
#pragma unroll
          for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
            const bool inside = !RAGGED || chunk * ARK_CHUNK + W::place(s) < K;
            float v[8];
            input.take(s, v);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              if (!inside) v[e] = 0.0f;
              if constexpr (P::norm) {
                own[j] += v[e] * v[e];
                v[e] *= factors[s][e];
              }
            }
            ark_several_parts<W>(v, parts[s]);
          }
          // Later elements are asked for while these are multiplied.
          const int later = chunk + (j + 1) / COLUMNS * ARK_WARPS;
          input.template ask<W>(c, x, column((j + 1) % COLUMNS), later, K);
          if constexpr (W::SCALES == 0) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
#pragma unroll
              for (int s = 0; s < ARK_CHUNK_STEPS; ++s) {
                const bool inside = !RAGGED || chunk * ARK_CHUNK + W::place(s) < K;
                const ark_u32x4 there = W::step(ring[a][g], s);
                const ark_u32x4 row = inside ? there : ark_u32x4(0u);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                  sums[g][j] = ark_mfma_step(parts[s][p], row, sums[g][j]);
                }
              }
            }
          } else {
            const auto sums_of = [&](int g) -> auto& { return sums[g][j]; };
            ark_several_scaled<W, K>(chunk * ARK_CHUNK, parts, ring[a], sums_of);
          }
        }
        const bool last = round + a + AHEAD >= CHUNKS;
        const int next = last ? chunk - (CHUNKS - AHEAD) * ARK_WARPS : chunk + AHEAD * ARK_WARPS;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          ring[a][g] = weights.load(top + (last ? GROUP * 16 : 0) + g * 16, next);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      float ahead[OWN][1][WIDTH] = {};
      const auto place = [&](int o) { return ark_tid() + o * ARK_THREADS; };
      const auto row_of = [&](int o) { return top + place(o) % UNITS * WIDTH; };
      const auto column_of = [&](int o) { return j * 16 + place(o) / UNITS; };
      const auto stored = [&](int o) {
        return place(o) < UNITS * 16 && row_of(o) < rows && column_of(o) < M;
      };
#pragma unroll
      for (int o = 0; o < OWN; ++o) {
        if (!stored(o)) continue;
        ark_sums_ahead(c, epilogue, column_of(o), first + row_of(o), rows - row_of(o), ahead[o]);
      }
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const int row = (warp * GROUP + g) * 16 + lane % 16;
        *reinterpret_cast<ark_mfma_sums*>(slab + row * PITCH + lane / 16 * 4) = sums[g][j];
      }
      if constexpr (P::norm) {
        own[j] += ark_shfl_xor(own[j], 16);
        own[j] += ark_shfl_xor(own[j], 32);
        if (lane < 16) red[warp * 16 + lane] = own[j];
      }
      ark_sync();
#pragma unroll
      for (int o = 0; o < OWN; ++o) {
        if (!stored(o)) continue;
        float scale = 1.0f, total[WIDTH];
        if constexpr (P::norm) {
          float squares = 0.0f;
#pragma unroll
          for (int w = 0; w < ARK_WARPS; ++w) squares += red[w * 16 + column_of(o) % 16];
          scale = ark_rsqrt(squares / K + prologue.eps);
        }
#pragma unroll
        for (int r = 0; r < WIDTH; ++r) {
          total[r] = 0.0f;
#pragma unroll
          for (int w = 0; w < ARK_WARPS; ++w) {
            const int row = w * GROUP * 16 + row_of(o) - top + r;
            total[r] += slab[row * PITCH + column_of(o) % 16];
          }
          total[r] *= scale;
        }
        const int row = row_of(o);
        ark_sums_store(c, epilogue, column_of(o), first + row, rows - row, total, ahead[o][0]);
      }
      ark_sync();
    }
  }
  return true;
}
