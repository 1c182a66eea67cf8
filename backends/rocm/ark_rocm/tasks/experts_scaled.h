// Products of fp4 weights of chosen experts with one input row per expert, by gfx950's scaled
// matrix instruction, which reads fp4 codes without a conversion. Each element of the input is
// split into six 8-bit floats (e5m2), its parts, whose sum is the element. One instruction
// multiplies all parts by the codes. The parts are rows of its left operand. Rows of the weights
// are columns of its right operand.

typedef int ark_i32x4 __attribute__((ext_vector_type(4)));
typedef int ark_i32x8 __attribute__((ext_vector_type(8)));

// The number of parts of an element of the input. Each part represents at least four bits of the
// remainder that the parts before it leave, so six parts have the 24 bits of a float.
constexpr int ARK_SCALED_PARTS = 6;
// One product has 256 elements along k and eight rows of the weights. Columns 0 to 7 of the right
// operand are the first halves of these rows along k, columns 8 to 15 the second halves. Row 4g + i
// of the left operand is part 2g + i % 2 of half i / 2 of the input.
constexpr int ARK_SCALED_DEPTH = 256, ARK_SCALED_ROWS = 8;
constexpr int ARK_SCALED_BLOCK = 32;  // elements that share a power of two

// The layout of an input row in shared memory. A step is 256 elements along k, in two halves. For
// each half and part, there is a row of 128 8-bit floats per step, padded to avoid bank conflicts.
// After these rows come the exponents of the blocks of 32 elements.
template <int STEPS>
struct ArkScaledInput {
  static constexpr int ROW = STEPS * 128 + 16, EXPONENTS_AT = 2 * ARK_SCALED_PARTS * ROW;
  static constexpr int BLOCKS = STEPS * 8, BYTES = (EXPONENTS_AT + BLOCKS + 15) / 16 * 16;

  // Splits INPUTS rows of K elements into parts. Of eight neighbouring elements, the even ones are
  // stored first, which is the order of the codes in a word. Each block of elements is scaled by a
  // power of two that moves its largest finite element to between 2^14 and 2^15. An infinity is in
  // the first part only; all parts of NaN are NaN.
  template <int K, int INPUTS>
  ARK_DEVICE void split(const float* xs, unsigned char* inputs) {
    constexpr int PIECES = BLOCKS * 4;
#pragma unroll 1
    for (int j = ark_tid(); j < INPUTS * PIECES; j += ARK_THREADS) {
      const int input = j / PIECES, k = j % PIECES * 8;
      ark_f32x4 v[2] = {};
      if (k < K) {
        v[0] = *reinterpret_cast<const ark_f32x4*>(xs + input * K + k);
        v[1] = *reinterpret_cast<const ark_f32x4*>(xs + input * K + k + 4);
      }
      const auto largest = [&](const auto& size) {
        float most = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) most = __builtin_fmaxf(most, size(v[e / 4][e % 4]));
        // Four neighbouring lanes hold the 32 elements of one block, which share a power of two.
        // The two moves exchange values of these lanes by quad_perm 1, 0, 3, 2 and 2, 3, 0, 1.
        most = __builtin_fmaxf(most, ark_row_move<0xb1>(most));
        return __builtin_fmaxf(most, ark_row_move<0x4e>(most));
      };
      float most = largest([](float x) { return __builtin_fabsf(x); });
      const bool odd = ark_ballot(most == ark_inf()) != 0u;
      if (odd) {
        most = largest([](float x) {
          const float size = __builtin_fabsf(x);
          return size < ark_inf() ? size : 0.0f;
        });
      }
      const int above = static_cast<int>(ark_float_bits(most) >> 23) - 14;
      const int exponent = above > 1 ? above : 1;
      const float unit = ark_bits_float(static_cast<ark_u32>(exponent) << 23);
      unsigned char* to = inputs + input * BYTES;
      if (j % 4 == 0) to[EXPONENTS_AT + k / 32] = static_cast<unsigned char>(exponent);
      unsigned char* at = to + k / 128 % 2 * ARK_SCALED_PARTS * ROW + k / 256 * 128 + k % 128;
      typedef float Two __attribute__((ext_vector_type(2)));
      typedef short Codes __attribute__((ext_vector_type(2)));
      Two left[4] = {
          {v[0][0], v[0][2]}, {v[1][0], v[1][2]}, {v[0][1], v[0][3]}, {v[1][1], v[1][3]}};
#pragma unroll
      for (int p = 0; p < ARK_SCALED_PARTS; ++p) {
        ark_u32 words[2];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const Two low = left[2 * w], high = left[2 * w + 1];
          Codes codes = __builtin_nondeterministic_value(codes);
          codes = __builtin_amdgcn_cvt_scalef32_pk_bf8_f32(codes, low[0], low[1], unit, false);
          codes = __builtin_amdgcn_cvt_scalef32_pk_bf8_f32(codes, high[0], high[1], unit, true);
          words[w] = __builtin_bit_cast(ark_u32, codes);
          if (p + 1 < ARK_SCALED_PARTS) {
            left[2 * w] -= __builtin_amdgcn_cvt_scalef32_pk_f32_bf8(words[w], unit, false);
            left[2 * w + 1] -= __builtin_amdgcn_cvt_scalef32_pk_f32_bf8(words[w], unit, true);
          }
        }
        if (p == 0 && odd) {  // infinity minus infinity is NaN
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float given = v[e / 4][e % 4];
            Two& own = left[e % 2 * 2 + e / 4];
            if (__builtin_fabsf(given) == ark_inf()) own[e % 4 / 2] = 0.0f;
          }
        }
        *reinterpret_cast<ark_u64*>(at + p * ROW) = static_cast<ark_u64>(words[1]) << 32 | words[0];
      }
    }
  }
};

// A lane's weights for one product: 32 codes of a row of weights, and the codes' scale (bf16).
struct ArkScaledPiece {
  ark_i32x4 codes;
  ark_u32 scale;
};

// Returns `sum` plus the products of an input's parts and codes. The instruction multiplies the
// parts by the powers of two in `exponents`, and the codes by the power of two `exponent`.
ARK_DEVICE ark_f32x4 ark_scaled_multiply(const ark_i32x8& parts, ark_u32 exponents,
                                         const ark_i32x4& codes, ark_u32 exponent, ark_f32x4 sum) {
  constexpr int INPUT = 1, CODES = 4;  // e5m2, e2m1
  const ark_i32x8 wide = __builtin_shufflevector(codes, codes, 0, 1, 2, 3, -1, -1, -1, -1);
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(parts, wide, sum, INPUT, CODES, 0,
                                                          static_cast<int>(exponents), 0,
                                                          static_cast<int>(exponent));
}
// Like ark_scaled_multiply, for codes whose scale is not a power of two. The scale is the sum of up
// to eight powers of two, one per bit of its mantissa, and the codes are multiplied once for each
// of these powers.
ARK_DEVICE ark_f32x4 ark_scaled_any(const ark_i32x8& parts, ark_u32 exponents,
                                    const ArkScaledPiece& piece, ark_f32x4 sum) {
  const ark_u32 exponent = piece.scale >> 7 & 0xffu;
  const int sign = static_cast<int>(piece.scale >> 15 != 0u ? 0x88888888u : 0u);
  const int first = exponent > 0u ? static_cast<int>(exponent) : 1;
#pragma unroll 1
  for (int bit = 0; bit < 8; ++bit) {
    const bool one = bit == 0 ? exponent > 0u : (piece.scale >> (7 - bit) & 1u) != 0u;
    const int own = exponent == 255u ? 255 : first - bit;
    const int kept = one && own >= 0 ? -1 : 0;
    ark_i32x4 codes;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = (piece.codes[i] ^ sign) & kept;
    sum =
        ark_scaled_multiply(parts, exponents, codes, static_cast<ark_u32>(own >= 0 ? own : 0), sum);
  }
  return sum;
}

// Like ark_expert_split (experts.h), by products of the scaled matrix instruction. A tile has eight
// rows of one run (one expert with one of its weight matrices). The tiles are divided among groups
// of K_WAVES waves, and the waves of a group divide a tile's steps along k. All loads of weights
// for ROWS outputs are in flight at once. While these weights are multiplied, the loads for the
// next ROWS outputs are in flight.
template <class ROW, int EXPERTS, int N, bool SLOTS, int FIRST, int OF, int WEIGHTS, int TOTAL,
          int K_WAVES, int STEPS, int ROWS, class X, class E, class F>
ARK_DEVICE bool ark_expert_scaled(ArkCtx& c, const ArkTask& t, X x, const unsigned char* bytes,
                                  const unsigned char* second, E experts, const F& finish) {
  typedef ArkScaledInput<STEPS * K_WAVES> Input;
  constexpr int K = ROW::COLUMNS, BLOCKS = K / ARK_SCALED_BLOCK;
  constexpr int ADDED = TOTAL > 0 ? TOTAL : 1, INPUTS = SLOTS ? ADDED : 1;
  constexpr int RUNS = ADDED * WEIGHTS, TILES = ROWS / ARK_SCALED_ROWS, ALL = RUNS * TILES;
  constexpr int SHARES = ARK_WARPS / K_WAVES, OWN = (ALL + SHARES - 1) / SHARES;
  // The number of tiles whose products alternate, so that consecutive products do not depend on
  // each other. With one input it is 1, so that a tile's products begin before the weights of all
  // tiles have arrived.
  constexpr int TOGETHER = INPUTS > 1 ? OWN : 1;
  constexpr bool ASKS = SLOTS;
  static_assert(OF <= EXPERTS || RUNS == 1, "a part of the experts has no epilogue");
  unsigned char* inputs = reinterpret_cast<unsigned char*>(ARK_SCRATCH(c));
  float* sums = reinterpret_cast<float*>(inputs + INPUTS * Input::BYTES);  // by tile, column, wave
  float* xs = sums + ALL * 16 * K_WAVES;
  const int row = t.coord[0], slot = TOTAL > 0 ? 0 : t.coord[1], end = t.coord[3];
  const int warp = __builtin_amdgcn_readfirstlane(ark_warp());
  const int k_wave = warp % K_WAVES, share = warp / K_WAVES, lane = ark_lane();
  if (!ark_enter(c)) return false;
  int expert[ADDED];
#pragma unroll
  for (int s = 0; s < ADDED; ++s) expert[s] = *ark_address(experts, 0, 0, row, slot + s);
  // From the arrival of the input until the next linear layer, few bytes are loaded. In this time
  // the block prefetches the next layer's first weights into caches.
  ArkLines next{nullptr, 0};
  ark_u32 asked[2] = {};
  if constexpr (ASKS) next = ark_next_lines(c, bytes);
  ArkPacketRows<K, INPUTS, SLOTS> held;
  held.load(x, row, slot);
#pragma unroll
  for (int s = 0; s < ADDED; ++s) {
    if (expert[s] < 0 || expert[s] >= OF) {
      if (ark_tid() == 0) {
        ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert[s]));
      }
      expert[s] = FIRST;
    }
    expert[s] = __builtin_amdgcn_readfirstlane(expert[s] - FIRST);
  }
  if (OF > EXPERTS && (expert[0] < 0 || expert[0] >= EXPERTS)) {
    for (int i = t.coord[2] + ark_tid(); i < end; i += ARK_THREADS)
      finish.store(row, slot, i, 0.0f);
    return true;
  }
  // The weights of this wave's tiles, from the task's first output on.
  const ark_global<unsigned char>* from[OWN];
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int tile = share * OWN + o < ALL ? share * OWN + o : ALL - 1, run = tile / TILES;
    int own = expert[0];
#pragma unroll
    for (int s = 1; s < ADDED; ++s) own = run / WEIGHTS == s ? expert[s] : own;
    const ark_i64 first = static_cast<ark_i64>(own) * N + t.coord[2];
    from[o] = ark_to_global(run % WEIGHTS > 0 ? second : bytes) +
              first * static_cast<ark_i64>(sizeof(ROW));
  }
  // Past the last row, the last row is loaded again. Past the last block of a row, the last block
  // is loaded again and has no effect, because the input is zero there.
  const auto load = [&](int o, int i, int top) {
    const int tile = share * OWN + o < ALL ? share * OWN + o : ALL - 1;
    const int in = top + tile % TILES * ARK_SCALED_ROWS + lane % ARK_SCALED_ROWS;
    const int of = in < end - t.coord[2] ? in : end - t.coord[2] - 1;
    const int at = (k_wave * STEPS + i) * 8 + lane % 16 / 8 * 4 + lane / 16;
    const int block = at < BLOCKS ? at : BLOCKS - 1;
    const auto* own = from[o] + static_cast<ark_u32>(of) * static_cast<ark_u32>(sizeof(ROW));
    const auto* scales = (const ark_global<ark_u16>*)(own + ROW::SCALES_AT);
    return ArkScaledPiece{
        __builtin_nontemporal_load((const ark_global<ark_i32x4>*)(own + block * 16)),
        scales[block * ROW::GROUPS / BLOCKS]};
  };
  ArkScaledPiece ring[OWN][STEPS];
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) ring[o][i] = load(o, i, 0);
  }
  ArkExpertResults<ADDED, TOTAL, F> results{finish, row, slot, expert, {}, 0.0f};
  const auto ahead = [&](int top) { results.ahead(top + ark_tid() < end ? top + ark_tid() : top); };
  held.take(c, x, row, slot, [&] { ahead(t.coord[2]); });
#pragma unroll
  for (int s = 0; s < INPUTS; ++s) {
#pragma unroll
    for (int e = 0; e < held.EACH; ++e) {
      const int k = ark_tid() + e * ARK_THREADS;
      if (k < K) xs[s * K + k] = held.v[s][e];
    }
  }
  ark_sync();
  if constexpr (ASKS) asked[0] = next.load(ark_tid());
  Input::template split<K, INPUTS>(xs, inputs);
  ark_sync();
  if constexpr (ASKS) asked[1] = next.load(ARK_THREADS + ark_tid());
  const int group = lane % 16 / 4 < 2 ? lane % 16 / 4 : 2, half = lane % 4 / 2;
  const int in_row = (half * ARK_SCALED_PARTS + 2 * group + lane % 2) * Input::ROW + lane / 16 * 16;
  const auto parts = [&](int input, int i, ark_u32& exponents) {
    const unsigned char* own = inputs + input * Input::BYTES;
    const int step = k_wave * STEPS + i;
    const auto* p = own + in_row + step * 128;
    const ark_i32x4 low = *reinterpret_cast<const ark_i32x4*>(p);
    const ark_i32x4 high = *reinterpret_cast<const ark_i32x4*>(p + 64);
    exponents = own[Input::EXPONENTS_AT + step * 8 + half * 4 + lane / 16];
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  };
  ark_i32x8 kept[INPUTS > 1 ? 1 : STEPS];
  ark_u32 kept_exponents[INPUTS > 1 ? 1 : STEPS];
  if constexpr (INPUTS == 1) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) kept[i] = parts(0, i, kept_exponents[i]);
  }
#pragma unroll 1
  for (int top = 0; top < end - t.coord[2]; top += ROWS) {
    const int left_rows = end - t.coord[2] - top, rows = left_rows < ROWS ? left_rows : ROWS;
    const auto products = [&](auto then) {
#pragma unroll
      for (int begin = 0; begin < OWN; begin += TOGETHER) {
        // In MXFP4 all scales are powers of two. This test finds out whether the loaded scales are.
        ark_u32 others = 0u, least = ~0u;
#pragma unroll
        for (int o = begin; o < begin + TOGETHER; ++o) {
#pragma unroll
          for (int i = 0; i < STEPS; ++i) {
            const ark_u32 scale = ring[o][i].scale;
            others |= scale & 0x807fu;
            least = scale < least ? scale : least;
          }
        }
        ark_f32x4 sum[TOGETHER] = {};
        const auto each = [&](const auto& multiply) {
#pragma unroll
          for (int o = 0; o < TOGETHER; ++o) {
            const int tile = share * OWN + begin + o;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
              const ArkScaledPiece& piece = ring[begin + o][i];
              if constexpr (INPUTS == 1) {
                sum[o] = multiply(kept[i], kept_exponents[i], piece, sum[o]);
              } else {
                ark_u32 exponents;
                const int run = (tile < ALL ? tile : ALL - 1) / TILES;
                const ark_i32x8 own = parts(run / WEIGHTS, i, exponents);
                sum[o] = multiply(own, exponents, piece, sum[o]);
              }
            }
          }
        };
        if (ark_warp_all((others == 0u) & (least >= 0x80u))) {
          each([](const ark_i32x8& x, ark_u32 exponents, const ArkScaledPiece& piece,
                  const ark_f32x4& to) {
            return ark_scaled_multiply(x, exponents, piece.codes, piece.scale >> 7, to);
          });
        } else {
          each([](const ark_i32x8& x, ark_u32 exponents, const ArkScaledPiece& piece,
                  const ark_f32x4& to) { return ark_scaled_any(x, exponents, piece, to); });
        }
#pragma unroll
        for (int o = 0; o < TOGETHER; ++o) {
#pragma unroll
          for (int i = 0; i < STEPS; ++i) then(begin + o, i);
        }
#pragma unroll
        for (int o = 0; o < TOGETHER; ++o) {
          const int tile = share * OWN + begin + o;
          const float two = lane % 16 < 8 ? sum[o][0] + sum[o][1] : sum[o][2] + sum[o][3];
          const float one = lane < 48 ? two : 0.0f;
          const ark_f32x4 all =
              __builtin_amdgcn_mfma_f32_16x16x4f32(1.0f, one, ark_f32x4{}, 0, 0, 0);
          if (lane < 16 && tile < ALL) sums[(tile * 16 + lane) * K_WAVES + k_wave] = all[0];
        }
      }
    };
    if (top + ROWS < end - t.coord[2]) {
      products([&](int o, int i) { ring[o][i] = load(o, i, top + ROWS); });
    } else {
      products([](int, int) {});
    }
    ark_sync();
    results.template store<WEIGHTS>(t.coord[2] + top, rows, [&](int r, int i) {
      const int tile = r * TILES + i / ARK_SCALED_ROWS;
      const float* of = sums + (tile * 16 + i % ARK_SCALED_ROWS) * K_WAVES;
      float sum = 0.0f;
#pragma unroll
      for (int p = 0; p < K_WAVES; ++p) sum += of[p] + of[ARK_SCALED_ROWS * K_WAVES + p];
      return sum;
    });
    if (top + ROWS < end - t.coord[2]) ahead(t.coord[2] + top + ROWS);
    ark_sync();
  }
  if constexpr (ASKS) asm volatile("" ::"v"(asked[0]), "v"(asked[1]));
  return true;
}
