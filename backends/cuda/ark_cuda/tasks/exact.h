// A tile of an fp32 matrix product in full fp32 precision, by ordinary FMA instructions.
// Asynchronous copies bring both operands to shared memory, several stages of k ahead. In shared
// memory, elements of equal k are neighbours, so that a thread reads its operands in vectors of
// four. A thread computes a block of TM rows by 8 columns of the tile, in groups of four columns.
// If a tile has fewer blocks than there are threads, several threads compute the same block. Each
// of them computes a slice: slice s takes every SLICES-th k of a stage. The slices' sums are added
// up in a fixed order, as a tree.

// One operand of a tile's product. It has HIGH rows (for b: columns) in shared memory, of which
// `rows` exist in the matrix (all of them if WHOLE). Element (row, k) of the matrix is at[row *
// ROW_STRIDE + k * K_STRIDE]. ALONG: false if elements of neighbouring rows are contiguous in
// memory, otherwise true.
template <int HIGH, int DEPTH, ark_i64 ROW_STRIDE, ark_i64 K_STRIDE, bool ALONG, bool WHOLE>
struct ArkExactSide {
  static constexpr int depth = DEPTH, PITCH = HIGH + 4;
  const float* at;
  int rows;

  // Starts the copies of KT elements along k, from element k0 on.
  template <int KT>
  ARK_DEVICE_MEMBER void copy(ark_u32 to, int k0) const {
    if constexpr (ALONG) {
      constexpr int ROUND = ARK_THREADS / 8;  // rows, of eight neighbouring k
      const int own = ark_tid() / 8 % HIGH, k = ark_tid() / 8 / HIGH * 8 + ark_tid() % 8;
#pragma unroll
      for (int i = 0; i < HIGH * KT / 8; i += ROUND) {
        const int row = own + i % HIGH, within = k + i / HIGH * 8;
        if (HIGH * KT / 8 % ROUND != 0 && within >= KT) break;
        const bool here = (WHOLE || row < rows) && (DEPTH % KT == 0 || k0 + within < DEPTH);
        ark_copy_word(to + 4u * (within * PITCH + row),
                      at + row * ROW_STRIDE + (k0 + within) * K_STRIDE, here);
      }
    } else {
      constexpr int ACROSS = HIGH / 4, ROUND = ARK_THREADS / ACROSS;
      const bool wide = K_STRIDE % 4 == 0 && ark_aligned(reinterpret_cast<ark_u64>(at));
      const int row = ark_tid() % ACROSS * 4, k = ark_tid() / ACROSS;
      const int there = WHOLE ? 4 : rows - row < 4 ? rows - row : 4;
#pragma unroll
      for (int i = 0; i < KT; i += ROUND) {
        const int within = k + i;
        if (KT % ROUND != 0 && within >= KT) break;
        const int left = DEPTH % KT == 0 || k0 + within < DEPTH ? there : 0;
        const ark_u32 place = to + 4u * (within * PITCH + row);
        const float* from = at + row + (k0 + within) * K_STRIDE;
        if (wide) {
          ark_copy_words(place, from, left > 0 ? 4 * left : 0);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) ark_copy_word(place + 4u * j, from + j, j < left);
        }
      }
    }
  }
};

// Adds the partial sums of MANY slices of k. Each slice was computed by UNITS threads, of which
// each has 2 * HALF sums. A thread keeps one half of its sums and passes the other half to the
// thread with the same position in another slice. first: set to the index of the first sum that the
// thread keeps.
template <int UNITS, int MANY, int HALF, int SUMS>
ARK_DEVICE void ark_exact_add(float* scratch, float (&sums)[SUMS], int slice, int& first) {
  if constexpr (MANY > 1) {
    constexpr int CHUNK = HALF < 8 ? HALF : 8;
    const bool high = (slice & MANY / 2) != 0;
    const int other = ark_tid() ^ MANY / 2 * UNITS;
#pragma unroll
    for (int e = 0; e < HALF; e += CHUNK) {
      ark_sync();
#pragma unroll
      for (int i = e; i < e + CHUNK; ++i) {
        scratch[(i - e) * ARK_THREADS + ark_tid()] = high ? sums[i] : sums[HALF + i];
      }
      ark_sync();
#pragma unroll
      for (int i = e; i < e + CHUNK; ++i) {
        sums[i] = (high ? sums[HALF + i] : sums[i]) + scratch[(i - e) * ARK_THREADS + other];
      }
    }
    first += high ? HALF : 0;
    ark_exact_add<UNITS, MANY / 2, HALF / 2>(scratch, sums, slice, first);
  }
}

// Computes a tile of ROWS by COLUMNS sums. Both operands are copied to shared memory, KT elements
// along k at a time, to a ring of STAGES stages. finish(row, column, v) receives four neighbouring
// sums.
template <int ROWS, int COLUMNS, int TM, int KT, int STAGES, class A, class B, class Finish>
ARK_DEVICE void ark_exact_tile(char* scratch, const A& a, const B& b, const Finish& finish) {
  constexpr int UNITS = ROWS / TM * (COLUMNS / 8), SLICES = ARK_THREADS / UNITS;
  constexpr int WIDE = COLUMNS < 64 ? 4 : 8, HIGH = 32 / WIDE;  // a warp's units
  constexpr int ACROSS = COLUMNS / (8 * WIDE), STEPS = (A::depth + KT - 1) / KT;
  constexpr int PART = KT * A::PITCH, STAGE = PART + KT * B::PITCH, SUMS = 8 * TM;
  static_assert(UNITS % 32 == 0 && SLICES * UNITS == ARK_THREADS && KT % SLICES == 0, "units");
  const int slice = ark_warp() / (UNITS / 32), warp = ark_warp() % (UNITS / 32);
  const int row = warp / ACROSS * (HIGH * TM) + ark_lane() / WIDE * 4;
  const int column = warp % ACROSS * (8 * WIDE) + ark_lane() % WIDE * 4;
  float* stages = reinterpret_cast<float*>(scratch);
  const ark_u32 shared = static_cast<ark_u32>(__cvta_generic_to_shared(scratch));
  const auto fetch = [&](int step) {
    const ark_u32 to = shared + 4u * STAGE * (step % STAGES);
    if (step < STEPS) {
      a.template copy<KT>(to, step * KT);
      b.template copy<KT>(to + 4u * PART, step * KT);
    }
    ark_copies_begun();
  };
  float sums[SUMS] = {};
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < STEPS; ++step) {
    ark_copies_but<STAGES - 2>();
    ark_sync();
    fetch(step + STAGES - 1);
    const float* left = stages + step % STAGES * STAGE + slice * A::PITCH + row;
    const float* right = stages + step % STAGES * STAGE + PART + slice * B::PITCH + column;
    float4 x[2][TM / 4], y[2][2];
    const auto read = [&](int k) {
#pragma unroll
      for (int g = 0; g < TM / 4; ++g) {
        const float* from = left + k * SLICES * A::PITCH + g * 4 * HIGH;
        x[k % 2][g] = *reinterpret_cast<const float4*>(from);
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const float* from = right + k * SLICES * B::PITCH + g * 4 * WIDE;
        y[k % 2][g] = *reinterpret_cast<const float4*>(from);
      }
    };
    read(0);
#pragma unroll
    for (int k = 0; k < KT / SLICES; ++k) {
      if (k + 1 < KT / SLICES) read(k + 1);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        const float4 r = x[k % 2][i / 4];
        const float v = i % 4 == 0 ? r.x : i % 4 == 1 ? r.y : i % 4 == 2 ? r.z : r.w;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const float4 w = y[k % 2][g];
          float* to = sums + i * 8 + g * 4;
          to[0] = fmaf(v, w.x, to[0]), to[1] = fmaf(v, w.y, to[1]);
          to[2] = fmaf(v, w.z, to[2]), to[3] = fmaf(v, w.w, to[3]);
        }
      }
    }
  }
  ark_copies_but<0>();
  int first = 0;
  ark_exact_add<UNITS, SLICES, SUMS / 2>(stages, sums, slice, first);
#pragma unroll
  for (int e = 0; e < SUMS / SLICES; e += 4) {
    const int i = (first + e) / 8, g = (first + e) / 4 % 2;
    const float v[4] = {sums[e], sums[e + 1], sums[e + 2], sums[e + 3]};
    finish(row + i % 4 + i / 4 * 4 * HIGH, column + g * 4 * WIDE, v);
  }
}
