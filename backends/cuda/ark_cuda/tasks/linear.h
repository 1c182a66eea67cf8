// One row through a linear layer, by all warps of a block together: warp w holds elements
// [w K / W, (w + 1) K / W) of the input in registers and takes that slice of every stage. No thread
// waits for input that it does not use, a stage is done in a sixteenth of a warp's time, and the
// slices' sums meet in shared memory once for many rows.

// The place of a thread's element i: vectors of E elements, a warp's vectors behind each other.
template <int E>
ARK_DEVICE int ark_slice_at(int i) {
  return i / E * 32 * E + ark_lane() * E + i % E;
}

// This thread's V elements of the input; plain memory, or packets, asked for together.
template <int V, int E, typename T>
ARK_DEVICE void ark_slice(ArkCtx&, const T* p, int stride, float (&x)[V], bool) {
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = ark_get(p, static_cast<ark_i64>(ark_slice_at<E>(i)) * stride);
}
template <int V, int E>
ARK_DEVICE void ark_slice(ArkCtx& c, const ark_u64* p, int stride, float (&x)[V], bool system) {
  constexpr int B = V < 16 ? V : 16;
#pragma unroll
  for (int first = 0; first < V; first += B) {
    ark_u64 seen[B] = {};  // no epoch is 0
    const ark_u64* late;
    do {
      late = nullptr;
#pragma unroll
      for (int b = 0; b < B; ++b) {
        if (first + b < V && !ark_packet_ready(c, seen[b])) {
          seen[b] = ark_packet_load(p + ark_slice_at<E>(first + b) * stride, system);
        }
      }
#pragma unroll
      for (int b = 0; b < B; ++b) {
        if (first + b < V && !ark_packet_ready(c, seen[b])) {
          late = p + ark_slice_at<E>(first + b) * stride;
        }
      }
    } while (ark_await_one(c, late, system));
#pragma unroll
    for (int b = 0; b < B; ++b) {
      if (first + b < V) x[first + b] = ark_bits_float(static_cast<ark_u32>(seen[b]));
    }
  }
}

// E elements in one load.
template <int E>
ARK_DEVICE void ark_load_vector(float (&to)[E], const float* p) {
  if constexpr (E == 4) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    const float2 v = *reinterpret_cast<const float2*>(p);
    to[0] = v.x, to[1] = v.y;
  }
}
template <int E, typename T>
ARK_DEVICE void ark_load_vector(float (&to)[E], const T* p) {
  ark_u32 words[E / 2];
  if constexpr (E == 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (E == 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *reinterpret_cast<const ark_u32*>(p);
  }
#pragma unroll
  for (int i = 0; i < E / 2; ++i) {
    const float2 pair = ark_pair(p, words[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

// Sums R values over the warp with R + log2(32 / R) - 1 exchanges; lane l gets the total of value
// l / (32 / R).
template <int R>
ARK_DEVICE float ark_fold(float (&v)[R]) {
#pragma unroll
  for (int n = R / 2, mask = 16; n > 0; n /= 2, mask /= 2) {
    const bool upper = (ark_lane() & mask) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float send = upper ? v[i] : v[i + n];
      v[i] = (upper ? v[i + n] : v[i]) + ark_shfl_xor(send, mask);
    }
  }
#pragma unroll
  for (int mask = 16 / R; mask > 0; mask /= 2) v[0] += ark_shfl_xor(v[0], mask);
  return v[0];
}

// A stage of R rows of K weights, or a part of a row: adds this thread's share of each row's
// product with x.
template <int R, int K, int V, int E, typename T>
ARK_DEVICE void ark_slice_dots(const T* w, const float (&x)[V], float (&sum)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int j = 0; j < V / E; ++j) {
      float weights[E];
      ark_load_vector<E>(weights, w + r * K + ark_slice_at<E>(j * E));
#pragma unroll
      for (int i = 0; i < E; ++i) sum[r] = fmaf(weights[i], x[j * E + i], sum[r]);
    }
  }
}

// The warp's sums of R rows, to part[0..R).
template <int R>
ARK_DEVICE void ark_slice_sums(float (&sum)[R], float* part) {
  const float total = ark_fold<R>(sum);
  if (ark_lane() % (32 / R) == 0) part[ark_lane() / (32 / R)] = total;
}

// The sum of the slices' parts of one row.
ARK_DEVICE float ark_slices(const float* part, int pitch) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < ARK_WARPS; ++w) sum += part[w * pitch];
  return sum;
}
