// Copies and sums between ranks by the moving warps (movers.h). They use plain memory, keep a few
// accesses of 16 bytes in flight per thread, and limit the rate at which they send bytes. The limit
// is such that all processors together fully use the links to peers.

// A processor sends at most ARK_MOVE_BYTES in ARK_MOVE_CYCLES clock cycles.
constexpr ark_u32 ARK_MOVE_BYTES = 4096u, ARK_MOVE_CYCLES = 3000u;

ARK_DEVICE ark_u32 ark_cycles() {
  ark_u32 now;
  asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
  return now;
}

template <typename T, int SHARES, int OUTPUTS>
struct ArkMoved {
  const T* from[SHARES];
  T* to[OUTPUTS];
};
template <typename T>
union ArkMovedChunk {
  ark_u32 words[4];
  T v[16 / sizeof(T)];
};

// Combines the same elements of all ranks' shares, for example by a sum.
template <typename T, typename JOIN, int DIVIDE, int SHARES>
ARK_DEVICE T ark_move_join(const T (&v)[SHARES]) {
  typedef decltype(ark_term(T())) A;
  if (SHARES == 1 && DIVIDE == 1) return v[0];
  A sum = ark_term(v[0]);
#pragma unroll
  for (int s = 1; s < SHARES; ++s) sum = ark_join(JOIN(), sum, ark_term(v[s]));
  T made;
  ark_store_term(made, DIVIDE == 1 ? sum : sum / static_cast<A>(DIVIDE));
  return made;
}

// Combines, by a single thread, the ranks' shares of BATCH chunks of 16 bytes. With a single share,
// copies the chunks. Chunks are STEP elements apart.
template <typename T, typename JOIN, int DIVIDE, int BATCH, int STEP, int SHARES, int OUTPUTS>
ARK_DEVICE void ark_move_chunks(const ArkMoved<T, SHARES, OUTPUTS>& at, ark_i64 first) {
  ArkMovedChunk<T> held[SHARES][BATCH];
#pragma unroll
  for (int s = 0; s < SHARES; ++s) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) ark_load_once(at.from[s] + first + b * STEP, &held[s][b]);
  }
  // All loads are issued before the first result is unpacked. Otherwise the compiler would wait for
  // each load before it issues the next.
#pragma unroll
  for (int s = 0; s < SHARES; ++s) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
#pragma unroll
      for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(held[s][b].words[w]));
    }
  }
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    if (SHARES > 1 || DIVIDE != 1) {
#pragma unroll
      for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
        T v[SHARES];
#pragma unroll
        for (int s = 0; s < SHARES; ++s) v[s] = held[s][b].v[e];
        held[0][b].v[e] = ark_move_join<T, JOIN, DIVIDE>(v);
      }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
      ark_store_words(at.to[o] + first + b * STEP, held[0][b].words);
    }
  }
}

// Combines the ranks' shares element by element and stores the result, or copies a single share. A
// task processes bytes t.coord[0] * UNIT to t.coord[1] * UNIT.
template <typename T, typename JOIN, int UNIT, int DIVIDE, int SHARES, int OUTPUTS>
ARK_DEVICE void ark_move(const ArkTask& t, bool aligned, const ArkMoved<T, SHARES, OUTPUTS>& at) {
  constexpr int BATCH = SHARES < 4 ? 4 / SHARES : 1, MANY = 16 / sizeof(T);
  constexpr int STEP = ARK_MOVE_THREADS * MANY;
  // The number of outputs that are in peers' memory. A copy (one share) has one output, which is on
  // a peer. A sum's first output is on this rank, and all others are on peers.
  constexpr ark_u32 FAR = SHARES == 1 ? 1u : OUTPUTS - 1u;
  constexpr ark_u32 BYTES = 16u * BATCH * ARK_MOVE_THREADS * FAR;
  constexpr ark_u32 CYCLES = ARK_MOVE_CYCLES * BYTES / ARK_MOVE_BYTES;
  constexpr int SIZE = static_cast<int>(sizeof(T));
  const int thread = ark_move_thread();
  ark_i64 first = static_cast<ark_i64>(t.coord[0]) * UNIT / SIZE;
  const ark_i64 end = static_cast<ark_i64>(t.coord[1]) * UNIT / SIZE;
  const ark_i64 whole = aligned ? end - (end - first) % MANY : first;
  ark_u32 then = ark_cycles();
#pragma unroll 1
  for (; whole - first >= BATCH * STEP; first += BATCH * STEP) {
    ark_move_chunks<T, JOIN, DIVIDE, BATCH, STEP>(at, first + thread * MANY);
    while (ark_cycles() - then < CYCLES) __nanosleep(64);
    then = ark_cycles();
  }
#pragma unroll 1
  for (first += thread * MANY; first < whole; first += STEP) {
    ark_move_chunks<T, JOIN, DIVIDE, 1, STEP>(at, first);
  }
#pragma unroll 1
  for (ark_i64 i = whole + thread; i < end; i += ARK_MOVE_THREADS) {
    T v[SHARES];
#pragma unroll
    for (int s = 0; s < SHARES; ++s) v[s] = at.from[s][i];
    const T made = ark_move_join<T, JOIN, DIVIDE>(v);
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) at.to[o][i] = made;
  }
}
