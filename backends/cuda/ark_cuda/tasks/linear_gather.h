// Copies the input rows of a batch to shared memory (for linear_batch.h). The input is in fp32, in
// packets or in plain memory, or in the weights' type in plain memory.

// Loads the elements of a row that a thread copies, in pairs, as ark_load_pairs does. From plain
// fp32 memory, a pair is one load of 8 bytes.
template <int N, typename P, typename There, typename At>
ARK_DEVICE void ark_row_pairs(ArkCtx& c, const P* p, const There& there, const At& at,
                              float (&v)[2 * N], bool system) {
  ark_load_pairs<N>(c, p, there, at, v, system);
}
template <int N, typename There, typename At>
ARK_DEVICE void ark_row_pairs(ArkCtx&, const float*, const There& there, const At& at,
                              float (&v)[2 * N], bool) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[2 * i] = v[2 * i + 1] = 0.0f;
    if (!there(i)) continue;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
                 : "l"(at(i))
                 : "memory");
  }
}

// Loads 16 bytes that another processor wrote, bypassing the L1 cache.
template <typename T>
ARK_DEVICE uint4 ark_load_far(const T* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Multiplies both 16-bit values of two words. The results equal fp32 products rounded to the type,
// because fp32 represents each product exactly.
ARK_DEVICE ark_u32 ark_multiply_pair(const ark_bf16*, ark_u32 a, ark_u32 b) {
  ark_u32 made;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(a), "r"(b));
  return made;
}
ARK_DEVICE ark_u32 ark_multiply_pair(const ark_f16*, ark_u32 a, ark_u32 b) {
  ark_u32 made;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(made) : "r"(a), "r"(b));
  return made;
}

// True if the input has the weights' type and is in plain memory.
template <typename P, typename W>
constexpr bool ARK_ROUNDED = false;
template <typename W>
inline constexpr bool ARK_ROUNDED<const W*, W> = true;

// The number of groups of eight elements of a row that one thread loads.
template <int K>
constexpr int ARK_ROW_EIGHTS = (K / 8 + ARK_THREADS - 1) / ARK_THREADS;

// Loads the norm's weights for the groups of eight elements that this thread copies.
template <int K, typename T>
ARK_DEVICE void ark_eight_factors(const T* norm, uint4 (&factor)[ARK_ROW_EIGHTS<K>]) {
#pragma unroll
  for (int i = 0; i < ARK_ROW_EIGHTS<K>; ++i) {
    const int at = 8 * (i * ARK_THREADS + ark_tid());
    factor[i] = *reinterpret_cast<const uint4*>(norm + (at < K ? at : K - 8));
  }
}

// Like ark_batch_rows, if the input and the norm's weights have the type of the layer's weights.
// All groups of eight elements of a thread are loaded at once. A thread without a group loads the
// last group, because a branch would cost registers.
template <int M, int K, int PITCH, bool NORM, bool BOXED, typename T, int F>
ARK_DEVICE void ark_batch_eights(const T* p, const uint4 (&factor)[F], T* xs, float (&square)[M]) {
  constexpr int EACH = ARK_ROW_EIGHTS<K>;
  uint4 v[EACH][M];
  const auto place = [&](int i) { return 8 * (i * ARK_THREADS + ark_tid()); };
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const T* from = p + (place(i) < K ? place(i) : K - 8);
#pragma unroll
    for (int m = 0; m < M; ++m) v[i][m] = ark_load_far(from + m * K);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (place(i) >= K) break;
    T* to = xs + (BOXED ? ark_box_place(place(i)) : place(i));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ark_u32 words[4] = {v[i][m].x, v[i][m].y, v[i][m].z, v[i][m].w};
      if constexpr (NORM) {
        const ark_u32 by[4] = {factor[i].x, factor[i].y, factor[i].z, factor[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 pair = ark_pair(p, words[e]);
          square[m] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, square[m]));
          words[e] = ark_multiply_pair(p, words[e], by[e]);
        }
      }
      if constexpr (BOXED) {  // the even pairs before the odd pairs
        uint2* even = reinterpret_cast<uint2*>(to + m * PITCH);
        uint2* odd = reinterpret_cast<uint2*>(to + m * PITCH + ARK_BOX_BLOCK / 2);
        *even = make_uint2(words[0], words[2]);
        *odd = make_uint2(words[1], words[3]);
      } else {
        *reinterpret_cast<uint4*>(to + m * PITCH) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Copies M rows of K elements to xs in shared memory, multiplied by `factor` if NORM. Rows in xs
// are PITCH elements apart. BOXED: elements are stored in the order that products of boxes need
// (ark_box_place). Adds the squares of this thread's elements to `square`, for each row.
template <int M, int K, int PITCH, bool NORM, bool BOXED, typename P, typename T, int F>
ARK_DEVICE void ark_batch_rows(ArkCtx& c, const P* p, const float (&factor)[F], T* xs,
                               float (&square)[M], bool system) {
  // With fewer warps a thread has more registers, so it loads more pairs at a time and waits for
  // memory less often.
  constexpr int MOST = ARK_WARPS > 9 ? 12 : 20;
  constexpr int EACH = ARK_ROW_PAIRS<K>, ALL = M * EACH, N = ALL < MOST ? ALL : MOST;
  constexpr int ROUNDS = (ALL + N - 1) / N;
#pragma unroll(NORM ? ROUNDS : 1)
  for (int first = 0; first < ALL; first += N) {
    float v[2 * N];
    const auto row = [&](int i) { return (first + i) / EACH; };
    const auto place = [&](int i) { return 2 * ((first + i) % EACH * ARK_THREADS + ark_tid()); };
    const auto there = [&](int i) { return first + i < ALL && place(i) < K; };
    const auto at = [&](int i) { return p + row(i) * K + place(i); };
    ark_row_pairs<N>(c, p, there, at, v, system);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!there(i)) continue;
      float a = v[2 * i], b = v[2 * i + 1];
      if constexpr (NORM) {
        float& own = square[row(i)];
        own = fmaf(a, a, fmaf(b, b, own));
        a *= factor[2 * ((first + i) % EACH)], b *= factor[2 * ((first + i) % EACH) + 1];
      }
      const int to = BOXED ? ark_box_place(place(i)) : place(i);
      ark_narrow(xs + row(i) * PITCH + to, a, b);
    }
  }
}
