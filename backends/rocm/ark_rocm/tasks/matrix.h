// Tiles of matrix products on matrix units: MFMA on CDNA, WMMA on RDNA 3. A wave multiplies blocks
// of 16 x 16. Only this header depends on which lane holds which element of a block.

#if defined(__GFX9__)
// Results: element e of a lane is at row 4 * (lane / 16) + e and column lane % 16 of a block.
// Operands: a lane has ARK_LANE_K consecutive elements of row lane % 16, from k = lane / 16 *
// ARK_LANE_K on. So the four groups of 16 lanes have different elements of the same 16 rows.
#if defined(__gfx950__)
constexpr int ARK_BLOCK_K = 32;
#else
constexpr int ARK_BLOCK_K = 16;
#endif
constexpr int ARK_BLOCK_ELEMENTS = 4;
constexpr int ARK_LANE_K = ARK_BLOCK_K / 4;
ARK_DEVICE int ark_block_row(int e) { return 4 * (ark_lane() / 16) + e; }
ARK_DEVICE int ark_lane_k() { return ark_lane() / 16 * ARK_LANE_K; }
#else
// Results: element e of a lane is at row 2 * e + lane / 16 and column lane % 16 of a block.
// Operands: a lane has all 16 elements of row lane % 16. So lanes 0 to 15 and lanes 16 to 31 have
// the same operands.
constexpr int ARK_BLOCK_K = 16;
constexpr int ARK_BLOCK_ELEMENTS = 8;
constexpr int ARK_LANE_K = 16;
ARK_DEVICE int ark_block_row(int e) { return 2 * e + ark_lane() / 16; }
ARK_DEVICE int ark_lane_k() { return 0; }
#endif

typedef float ark_block __attribute__((ext_vector_type(ARK_BLOCK_ELEMENTS)));
typedef short ark_part __attribute__((ext_vector_type(ARK_LANE_K)));
// The type by which a lane's part of an operand is accessed in shared memory. Its alignment is
// reduced to 8 or 16 bytes, because rows in shared memory are multiples of only so many bytes.
typedef ark_part ark_part_shared __attribute__((aligned(ARK_LANE_K * 2 < 16 ? 8 : 16)));
typedef _Float16 ark_part_f16 __attribute__((ext_vector_type(ARK_LANE_K)));
typedef __bf16 ark_part_bf16 __attribute__((ext_vector_type(ARK_LANE_K)));

ARK_DEVICE ark_part ark_load_part(const ark_u16* p) {
  return *reinterpret_cast<const ark_part_shared*>(p);
}

#if defined(__gfx90a__)
// Splits an fp16 into two bf16 whose sum is exactly the fp16, because the matrix units of MI200
// read 16-bit denormals as zero; bf16 represents numbers far below fp16's smallest. Infinity and
// NaN are in `high` only. They are then never multiplied by a part that is zero although the whole
// number is not.
struct ArkTwoParts {
  ark_part high, finite, low;
};
ARK_DEVICE ArkTwoParts ark_two_parts(ark_part v) {
  ArkTwoParts parts;
#pragma unroll
  for (int e = 0; e < ARK_LANE_K; ++e) {
    const float whole = ark_float(ark_f16{static_cast<ark_u16>(v[e])});
    const ark_u32 high = ark_float_bits(whole) & 0xffff0000u;
    const bool finite = (high & 0x7f800000u) != 0x7f800000u;
    const float low = finite ? whole - ark_bits_float(high) : 0.0f;
    parts.high[e] = static_cast<short>(high >> 16);
    parts.finite[e] = finite ? parts.high[e] : static_cast<short>(0);
    parts.low[e] = static_cast<short>(ark_float_bits(low) >> 16);
  }
  return parts;
}
ARK_DEVICE ark_block ark_multiply(const ark_f16*, ark_part a, ark_part b, ark_block c) {
  const ArkTwoParts x = ark_two_parts(a), y = ark_two_parts(b);
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.low, y.low, c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.finite, y.low, c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.low, y.finite, c, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.high, y.high, c, 0, 0, 0);
}
#else
ARK_DEVICE ark_block ark_multiply(const ark_f16*, ark_part a, ark_part b, ark_block c) {
  const ark_part_f16 x = __builtin_bit_cast(ark_part_f16, a);
  const ark_part_f16 y = __builtin_bit_cast(ark_part_f16, b);
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_f16(x, y, c, 0, 0, 0);
#elif defined(__GFX9__)
  return __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, c, 0, 0, 0);
#else
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, c);
#endif
}
#endif
ARK_DEVICE ark_block ark_multiply(const ark_bf16*, ark_part a, ark_part b, ark_block c) {
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(ark_part_bf16, a),
                                                 __builtin_bit_cast(ark_part_bf16, b), c, 0, 0, 0);
#elif defined(__GFX9__)
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
#else
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
#endif
}

// An address in shared memory. With this type the compiler keeps the address in a register instead
// of computing it again at each use.
template <typename T>
using ark_in_local = __attribute__((address_space(3))) T;
typedef ark_in_local<char> ark_local;
ARK_DEVICE ark_local* ark_kept(ark_local* p) {
  asm volatile("" : "+v"(p));
  return p;
}

// A piece is eight elements that are contiguous in memory: along k, or along the rows.
constexpr int ARK_PIECE = 8;

typedef unsigned char ark_u8x8 __attribute__((ext_vector_type(8)));
typedef ark_u16 ark_u16x8 __attribute__((ext_vector_type(8)));
typedef float ark_f32x8 __attribute__((ext_vector_type(8), aligned(16)));

// The type of a piece in registers, and its number of 16-bit parts in shared memory. A float is the
// exact sum of three bf16, so its products with bf16 keep fp32's precision.
template <typename T>
struct ArkElements {
  typedef ark_u16 element;
  typedef ark_u16x8 piece;
  static constexpr int PARTS = 1;
};
template <>
struct ArkElements<float> {
  typedef float element;
  typedef ark_f32x8 piece;
  static constexpr int PARTS = 3;
};

// In shared memory, 8-bit floats are stored as bf16, which represents each of them exactly. If the
// matrix units multiply 8-bit floats directly, the floats are stored unchanged, two neighbours
// along k per 16-bit element (matrix_pairs.h).
template <typename T>
struct ArkSmallElements {
  typedef unsigned char element;
  typedef ark_u8x8 piece;
  static constexpr int PARTS = 1;
};
template <>
struct ArkElements<ark_e4m3> : ArkSmallElements<ark_e4m3> {};
template <>
struct ArkElements<ark_e5m2> : ArkSmallElements<ark_e5m2> {};
template <typename T>
ARK_DEVICE ark_block ark_multiply(const T*, ark_part a, ark_part b, ark_block c) {
  static_assert(sizeof(T) == 1, "floats of 8 bits, widened");
  return ark_multiply(static_cast<const ark_bf16*>(nullptr), a, b, c);
}

// Sizes along k for an element type. STEP: the elements that shared memory holds at once. BLOCK_K:
// the elements that one `ark_products` multiplies, of which a lane holds a `part`.
template <typename T>
struct ArkUnit {
  static constexpr int STEP = 32, BLOCK_K = ARK_BLOCK_K;
  typedef ark_part part;
  ARK_METHOD static part load(const ark_u16* p) { return ark_load_part(p); }
};
template <typename A, typename B>
ARK_DEVICE ark_block ark_products(const A*, const B* b, ark_part x, ark_part y, ark_block c) {
  return ark_multiply(b, x, y, c);
}
// The factor by which the matrix units' sums must be multiplied. It is not 1 for 8-bit floats whose
// hardware format has another exponent bias.
template <typename A, typename B>
constexpr float ARK_SUM_SCALE = 1.0f;

// Converts a piece (eight elements) of the 8-bit type T to bf16, the upper 16 bits of fp32. Larger
// types are split into two or three such 16-bit parts, whose sum is the element.
template <typename T>
ARK_DEVICE void ark_split_of(const T*, const ark_u8x8& piece, ark_u16x8* parts) {
#pragma unroll
  for (int e = 0; e < ARK_PIECE; ++e) {
    parts[0][e] = static_cast<ark_u16>(ark_float_bits(ark_float(T{piece[e]})) >> 16);
  }
}
ARK_DEVICE void ark_split(const ark_u16x8& piece, ark_u16x8* parts) { parts[0] = piece; }
ARK_DEVICE void ark_split(const ark_f32x8& piece, ark_u16x8* parts) {
#pragma unroll
  for (int e = 0; e < ARK_PIECE; ++e) {
    float rest = piece[e];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const ark_u32 bits = ark_float_bits(rest);
      parts[part][e] = static_cast<ark_u16>(bits >> 16);
      // For an infinity or NaN, the remainder after the first part is set to 0.
      const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
      rest = finite ? rest - ark_bits_float(bits & 0xffff0000u) : 0.0f;
    }
  }
}

template <typename T, typename Piece>
ARK_DEVICE void ark_split_of(const T*, const Piece& piece, ark_u16x8* parts) {
  ark_split(piece, parts);
}

template <bool ALONG_K, typename T>
ARK_DEVICE typename ArkElements<T>::piece ark_fetch_piece(const ArkSide<T>& side, int row, int k) {
  typedef typename ArkElements<T>::element element;
  typedef typename ArkElements<T>::piece whole;
  const auto* from =
      (const ark_global<element>*)(side.at + row * side.row_stride + k * side.k_stride);
  const bool inside = ALONG_K ? row < side.rows : k < side.depth;
  const int left = !inside ? 0 : ALONG_K ? side.depth - k : side.rows - row;
  const ark_i64 stride = ALONG_K ? side.k_stride : side.row_stride;
  if (left >= ARK_PIECE && stride == 1 && (reinterpret_cast<ark_u64>(from) & 15u) == 0u) {
    return *(const ark_global<whole>*)from;
  }
  whole piece = 0;
#pragma unroll
  for (int i = 0; i < ARK_PIECE; ++i) {
    if (i < left) piece[i] = from[i * stride];
  }
  return piece;
}

// Makes known to the compiler that a value is the same in all lanes of the wave.
ARK_DEVICE ark_u64 ark_uniform(ark_u64 v) {
  const int low = __builtin_amdgcn_readfirstlane(static_cast<int>(v));
  const int high = __builtin_amdgcn_readfirstlane(static_cast<int>(v >> 32));
  return static_cast<ark_u64>(static_cast<ark_u32>(high)) << 32 | static_cast<ark_u32>(low);
}

// Loads a step of one operand, ROWS x STEP elements, from memory into registers and from there into
// shared memory.
template <int ROWS, bool ALONG_K, typename T>
struct ArkStep {
  static constexpr int STEP = ArkUnit<T>::STEP;
  static constexpr int PITCH = STEP + ARK_PIECE;  // padded, so that rows fall on different banks
  static constexpr int TOTAL = ROWS * STEP / ARK_PIECE;
  static constexpr int MINE = (TOTAL + ARK_THREADS - 1) / ARK_THREADS;
  static constexpr int PARTS = ArkElements<T>::PARTS;
  typename ArkElements<T>::piece pieces[MINE];
  // Used if the whole step is inside of the matrix. base: the address of the step's first element.
  // stride: bytes between neighbours along k. offsets: the offset of each piece that this thread
  // loads.
  ark_u64 base, stride;
  ark_u32 offsets[MINE];

  ARK_METHOD static bool inside(const ArkSide<T>& side) {
    const ark_i64 near = ALONG_K ? side.k_stride : side.row_stride;
    const ark_i64 far = ALONG_K ? side.row_stride : side.k_stride;
    const bool aligned = (reinterpret_cast<ark_u64>(side.at) & 15u) == 0u && far % ARK_PIECE == 0;
    return near == 1 && aligned && far > 0 && far < (1 << 20) && side.rows >= ROWS &&
           side.depth % STEP == 0 && TOTAL % ARK_THREADS == 0;
  }
  ARK_METHOD void begin_inside(const ArkSide<T>& side, int tid) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int piece = tid + i * ARK_THREADS;
      const ark_i64 at = row_of(piece) * side.row_stride + k_of(piece) * side.k_stride;
      offsets[i] = static_cast<ark_u32>(at) * sizeof(T);
    }
    base = ark_uniform(reinterpret_cast<ark_u64>(side.at));
    stride = sizeof(T) * (ALONG_K ? 1u : ark_uniform(static_cast<ark_u64>(side.k_stride)));
  }
  ARK_METHOD void fetch_inside(int k0) {
    const auto* from = (const ark_global<char>*)(base + static_cast<ark_u64>(k0) * stride);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      pieces[i] = *(const ark_global<typename ArkElements<T>::piece>*)(from + offsets[i]);
    }
  }
  ARK_METHOD void fetch(const ArkSide<T>& side, int k0, int tid) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int piece = tid + i * ARK_THREADS;
      if (piece < TOTAL) {
        pieces[i] = ark_fetch_piece<ALONG_K>(side, row_of(piece), k0 + k_of(piece));
      }
    }
  }
  ARK_METHOD void place(ark_u16* tile, int tid) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int piece = tid + i * ARK_THREADS;
      if (piece >= TOTAL) continue;
      ark_u16x8 parts[PARTS];
      ark_split_of(static_cast<const T*>(nullptr), pieces[i], parts);
      ark_u16* to = tile + row_of(piece) * PITCH + k_of(piece);
#pragma unroll
      for (int part = 0; part < PARTS; ++part, to += ROWS * PITCH) {
        if (ALONG_K) {
          *reinterpret_cast<ark_u16x8*>(to) = parts[part];
        } else {
#pragma unroll
          for (int e = 0; e < ARK_PIECE; ++e) to[e * PITCH] = parts[part][e];
        }
      }
    }
  }
  ARK_METHOD static int row_of(int piece) {
    return ALONG_K ? piece / (STEP / ARK_PIECE) : piece % (ROWS / ARK_PIECE) * ARK_PIECE;
  }
  ARK_METHOD static int k_of(int piece) {
    return ALONG_K ? piece % (STEP / ARK_PIECE) * ARK_PIECE : piece / (ROWS / ARK_PIECE);
  }
};

// Computes one TM x TN tile of a product and passes the sums to `end` (matrix_store.h). The waves
// are arranged as WAVES_M by WAVES_N. `shared` holds BUFFERS steps of both operands: with two
// buffers, the next step is stored while slow waves still multiply the current one.
//
// If blocks do not divide evenly among waves, a wave without a last block multiplies the tile's
// last block again and does not store the sums. It does not skip the multiplication, because a
// branch would create several paths through the loop, and clang 22 omits wait states after matrix
// instructions on such paths (docs/history/emulator.md).
template <int TM, int TN, int WAVES_M, int WAVES_N, int BUFFERS, bool A_ALONG_K, bool B_ALONG_K,
          typename A, typename B, class End>
ARK_DEVICE void ark_matrix_tile(char* shared, const ArkSide<A>& a, const ArkSide<B>& b,
                                const End& end) {
  static_assert(WAVES_M * WAVES_N == ARK_WARPS, "every wave has its place");
  constexpr int BLOCKS_M = (TM / 16 + WAVES_M - 1) / WAVES_M;
  constexpr int BLOCKS_N = (TN / 16 + WAVES_N - 1) / WAVES_N;
  constexpr int PARTS = ArkElements<A>::PARTS;
  typedef ArkUnit<B> Unit;
  constexpr int PITCH = Unit::STEP + ARK_PIECE;
  constexpr int STEP = (PARTS * TM + TN) * PITCH;
  ark_u16* tiles = reinterpret_cast<ark_u16*>(shared);
  const int tid = ark_tid();
  const int wave_m = ark_warp() % WAVES_M, wave_n = ark_warp() / WAVES_M;
  const int at = ark_lane() % 16 * PITCH + ark_lane_k();
  ark_block sums[BLOCKS_M][BLOCKS_N];
#pragma unroll
  for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
    for (int j = 0; j < BLOCKS_N; ++j) sums[i][j] = 0.0f;
  }
  ArkStep<TM, A_ALONG_K, A> step_a;
  ArkStep<TN, B_ALONG_K, B> step_b;
  const int steps = (a.depth + Unit::STEP - 1) / Unit::STEP;
  const auto inside = [](int row, int last) { return row < last ? row : last; };
  const auto multiply = [&](const ark_u16* tile_a) __attribute__((always_inline)) {
    const ark_u16* tile_b = tile_a + PARTS * TM * PITCH;
#pragma unroll
    for (int k = 0; k < Unit::STEP; k += Unit::BLOCK_K) {
      typename Unit::part parts[BLOCKS_N];
#pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j) {
        const int row = inside((wave_n + j * WAVES_N) * 16, TN - 16);
        parts[j] = Unit::load(tile_b + row * PITCH + at + k);
      }
#pragma unroll
      for (int i = 0; i < BLOCKS_M; ++i) {
        const int row = inside((wave_m + i * WAVES_M) * 16, TM - 16);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const auto left = Unit::load(tile_a + (part * TM + row) * PITCH + at + k);
#pragma unroll
          for (int j = 0; j < BLOCKS_N; ++j) {
            sums[i][j] = ark_products(a.at, b.at, left, parts[j], sums[i][j]);
          }
        }
      }
    }
  };
  // With 64 lanes, there are enough registers to unroll the loop by the number of buffers. The
  // buffer of each step is then a compile-time constant.
  constexpr int ROUNDS = ARK_LANES == 64 ? BUFFERS : 1;
  const auto run = [&](auto fetch) __attribute__((always_inline)) {
    fetch(0);
#pragma unroll ROUNDS
    for (int s = 0; s < steps; ++s) {
      ark_u16* tile_a = tiles + s % BUFFERS * STEP;
      step_a.place(tile_a, tid);
      step_b.place(tile_a + PARTS * TM * PITCH, tid);
      ark_sync();
      if (s + 1 < steps) fetch((s + 1) * Unit::STEP);
      multiply(tile_a);
      if (BUFFERS == 1) ark_sync();
    }
  };
  // If a step is inside both matrices, its loads need no tests.
  if (step_a.inside(a) && step_b.inside(b)) {
    step_a.begin_inside(a, tid);
    step_b.begin_inside(b, tid);
    run([&](int k0) __attribute__((always_inline)) {
      step_a.fetch_inside(k0);
      step_b.fetch_inside(k0);
    });
  } else {
    run([&](int k0) __attribute__((always_inline)) {
      step_a.fetch(a, k0, tid);
      step_b.fetch(b, k0, tid);
    });
  }
  if constexpr (ARK_SUM_SCALE<A, B> != 1.0f) {
    ark_settle(sums);
#pragma unroll
    for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
      for (int j = 0; j < BLOCKS_N; ++j) sums[i][j] *= ARK_SUM_SCALE<A, B>;
    }
  }
  ark_tile_blocks<16, WAVES_M * 16, WAVES_N * 16>(shared, sums, wave_m * 16, wave_n * 16, a.rows,
                                                  b.rows, ark_block_row, end);
}
