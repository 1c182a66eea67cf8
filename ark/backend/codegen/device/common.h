// Helper functions for task bodies. They use only the device ABI (docs/device-abi.md), so every
// backend can compile them.

// ark_get loads an element of any storage type as a float. ark_put stores a float as an element.
ARK_DEVICE float ark_get(const float* p, ark_i64 i) { return p[i]; }
ARK_DEVICE float ark_get(const ark_f16* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE float ark_get(const ark_bf16* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE void ark_put(float* p, ark_i64 i, float v) { p[i] = v; }
ARK_DEVICE void ark_put(ark_f16* p, ark_i64 i, float v) { p[i] = ark_half(v); }
ARK_DEVICE void ark_put(ark_bf16* p, ark_i64 i, float v) { p[i] = ark_bfloat(v); }

// Returns a rank's own value of a parameter that differs between ranks (TaskKind.own). Ranks share
// one compiled kernel, so such a value cannot be a constant of the body; it is stored among the
// last coordinates of each task's record. I: the place of the value, counted from the end.
template <int I>
ARK_DEVICE int ark_own(const ArkTask& t) {
  return t.coord[sizeof(t.coord) / sizeof(t.coord[0]) - 1u - I];
}

// 1 / v. A backend with a faster reciprocal, accurate to a unit in the last place, defines
// ARK_HAS_RECIPROCAL.
#if !defined(ARK_HAS_RECIPROCAL)
ARK_DEVICE float ark_reciprocal(float v) { return 1.0f / v; }
#endif
// 1 / v, like ark_reciprocal, but subnormal arguments and results may be replaced by 0. A backend
// on which this is faster defines ARK_HAS_RECIPROCAL_FLUSHED and its own version.
#if !defined(ARK_HAS_RECIPROCAL_FLUSHED)
ARK_DEVICE float ark_reciprocal_flushed(float v) { return ark_reciprocal(v); }
#endif

// The quotient a / b of integers whose quotient is defined (b is not 0 and nothing overflows).
// 64-bit numbers that fit into 32 bits are divided in 32 bits, which is several times as fast.
template <typename T>
ARK_DEVICE T ark_int_quotient(T a, T b) {
  const ark_i32 x = static_cast<ark_i32>(a), y = static_cast<ark_i32>(b);
  if (sizeof(T) > 4 && x == a && y == b) return x / y;
  return a / b;
}
// Integer division, rounded towards zero, that never traps: division by 0 gives 0, and overflow
// wraps around.
template <typename T>
ARK_DEVICE T ark_int_div(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<T>(0u - static_cast<ark_u64>(a));
  return ark_int_quotient(a, b);
}

// The sum over all computing threads, which each of them gets. scratch: ARK_WARPS floats of shared
// memory.
ARK_DEVICE float ark_block_sum(float v, float* scratch) {
  v = ark_warp_sum(v);
  if (ARK_WARPS == 1) return v;
  if (ark_lane() == 0) scratch[ark_warp()] = v;
  ark_sync();
  float total = 0.0f;
  for (int w = 0; w < ARK_WARPS; ++w) total += scratch[w];
  ark_sync();
  return total;
}

// ark_load and ark_publish load and store an element of an operand. The pointer's type selects
// plain memory or packets ({value, epoch} pairs). Loading a packet waits until it has arrived.
template <typename T>
ARK_DEVICE float ark_load(ArkCtx&, const T* p, ark_i64 i, bool) {
  return ark_get(p, i);
}
ARK_DEVICE float ark_load(ArkCtx& c, const ark_u64* p, ark_i64 i, bool system) {
  return ark_wait_packet(c, p + i, system);
}
template <typename T>
ARK_DEVICE void ark_publish(ArkCtx&, T* p, ark_i64 i, float v, bool) {
  ark_put(p, i, v);
}
ARK_DEVICE void ark_publish(ArkCtx& c, ark_u64* p, ark_i64 i, float v, bool system) {
  ark_publish_packet(c, p + i, v, system);
}

// Loads a row of n elements, `stride` apart, into xs in shared memory, and returns the calling
// thread's part of the sum of squares of the elements. Thread t loads elements t, t + ARK_THREADS
// and so on. With SCALED, xs contains a factor for each element before the call, and element times
// factor is stored. ARK_BATCH loads are issued together, so that they share one memory latency. If
// packets have not arrived, the thread waits for one of them and then repeats the other loads.
constexpr int ARK_BATCH = 8;

template <bool SCALED>
ARK_DEVICE float ark_store_scaled(float v, float* at) {
  *at = SCALED ? *at * v : v;
  return v * v;
}
template <bool SCALED, typename T>
ARK_DEVICE float ark_load_row(ArkCtx&, const T* p, int stride, int n, float* xs, bool) {
  float squares = 0.0f;
  for (int first = ark_tid(); first < n; first += ARK_BATCH * ARK_THREADS) {
    float v[ARK_BATCH];
    for (int b = 0; b < ARK_BATCH; ++b) {
      const int k = first + b * ARK_THREADS;
      v[b] = k < n ? ark_get(p, static_cast<ark_i64>(k) * stride) : 0.0f;
    }
    for (int b = 0; b < ARK_BATCH; ++b) {
      const int k = first + b * ARK_THREADS;
      if (k < n) squares += ark_store_scaled<SCALED>(v[b], xs + k);
    }
  }
  return squares;
}
template <bool SCALED>
ARK_DEVICE float ark_load_row(ArkCtx& c, const ark_u64* p, int stride, int n, float* xs,
                              bool system) {
  float squares = 0.0f;
  for (int first = ark_tid(); first < n; first += ARK_BATCH * ARK_THREADS) {
    ark_u64 seen[ARK_BATCH] = {};  // no epoch is 0
    for (;;) {
      const ark_u64* late = nullptr;
      for (int b = 0; b < ARK_BATCH; ++b) {
        const int k = first + b * ARK_THREADS;
        if (k < n && !ark_packet_ready(c, seen[b])) {
          seen[b] = ark_packet_load(p + static_cast<ark_i64>(k) * stride, system);
        }
      }
      for (int b = 0; b < ARK_BATCH; ++b) {
        const int k = first + b * ARK_THREADS;
        if (k < n && !ark_packet_ready(c, seen[b])) late = p + static_cast<ark_i64>(k) * stride;
      }
      if (late == nullptr || ark_failed(c)) break;
      ark_wait_packet(c, late, system);
    }
    for (int b = 0; b < ARK_BATCH; ++b) {
      const int k = first + b * ARK_THREADS;
      if (k < n) {
        squares += ark_store_scaled<SCALED>(ark_bits_float(static_cast<ark_u32>(seen[b])), xs + k);
      }
    }
  }
  return squares;
}

// Rotates a pair of neighbouring elements by an angle, which is given by its sine and cosine (RoPE
// as a product of complex numbers).
ARK_DEVICE void ark_rotate(float& a, float& b, float sine, float cosine) {
  const float x = a, y = b;
  a = x * cosine - y * sine;
  b = x * sine + y * cosine;
}

// The dot products of x with ROWS rows. The warp's totals are returned in every lane.
template <int ROWS, typename T>
ARK_DEVICE void ark_dots(const T* w, int stride, const float* x, int k, float* acc) {
#if defined(ARK_HAS_ROWS_DOT)
  ark_rows_dot<ROWS>(w, stride, x, k, acc);
#else
  for (int r = 0; r < ROWS; ++r) acc[r] = ark_row_dot(w + static_cast<ark_i64>(r) * stride, x, k);
#endif
  for (int r = 0; r < ROWS; ++r) acc[r] = ark_warp_sum(acc[r]);
}
