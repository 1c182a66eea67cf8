// A linear layer of one input row, in which all warps of a block share each row of weights. Warp w
// of W holds elements w K / W to (w + 1) K / W - 1 of the input (its slice) in registers. It
// multiplies this slice by the same elements of every row of weights. So each thread waits only for
// the input that it uses, and a stage takes 1 / W of the time of a single warp. The sums of all
// slices are combined through shared memory, once for many rows.

// The position in the input of element i that a thread holds. Threads have vectors of E elements.
// The vectors of a warp are contiguous.
template <int E>
ARK_DEVICE int ark_slice_at(int i) {
  return i / E * 32 * E + ark_lane() * E + i % E;
}

// Loads the V elements of the input that this thread multiplies, from plain memory or from packets.
// All loads are in flight at the same time.
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

// Loads E elements in one access.
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

// Adds to sum[r] this thread's part of the dot product of the input with row r of a stage. x: the
// thread's V elements of the input. A stage has R rows of K weights, or a part of one row.
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

// Writes the warp's sums for R rows of weights to part[0..R).
template <int R>
ARK_DEVICE void ark_slice_sums(float (&sum)[R], float* part) {
  const float total = ark_warp_sums<R>(sum);
  if (ark_lane() % (32 / R) == 0) part[ark_lane() / (32 / R)] = total;
}

// Adds up the sums of all warps for one row of weights.
ARK_DEVICE float ark_slices(const float* part, int pitch) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < ARK_WARPS; ++w) sum += part[w * pitch];
  return sum;
}

// Computes a linear layer of one input row for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1. Weights have type W. A stage (slot of the ring in shared memory) has R rows of K
// elements. If P > 1, a row is divided among P stages. E elements of the input are loaded at once.
// PITCH: the number of rows whose sums are kept until the epilogue.
template <typename W, int K, int R, int P, int E, int PITCH, class X, class N, class S>
ARK_DEVICE void ark_linear_slices(ArkCtx& c, const ArkTask& t, X input, const N& prologue,
                                  S epilogue) {
  constexpr int V = K / P / ARK_THREADS, WIDTH = S::WIDTH;
  float* part = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* squares = part + ARK_WARPS * PITCH;
  const int slice = ark_warp() * (K / P / ARK_WARPS);
  float x[P][V];
  float early[1][WIDTH] = {};  // of a thread's first rows, asked for before it waits for the input
  if constexpr (!S::WAITS) {
    const int first = WIDTH * ark_tid();
    if (first < t.coord[1] - t.coord[0] && first < PITCH) {
      ark_sums_ahead(c, epilogue, 0, t.coord[0] + first, WIDTH, early);
    }
  }
  const auto load = [&] {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      ark_slice<V, E>(c, input.p + (p * (K / P) + slice) * X::step, X::step, x[p], X::system);
    }
  };
  if constexpr (N::norm) {
    float factor[P][V];
#pragma unroll
    for (int i = 0; i < P * V; ++i) {
      factor[i / V][i % V] =
          ark_get(prologue.weight.p, i / V * (K / P) + slice + ark_slice_at<E>(i % V));
    }
    load();
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < P * V; ++i) {
      square = fmaf(x[i / V][i % V], x[i / V][i % V], square);
      x[i / V][i % V] *= factor[i / V][i % V];
    }
    square = ark_warp_sum(square);
    if (ark_lane() == 0) squares[ark_warp()] = square;
  } else {
    load();
  }
  ark_u32 stage = t.fetch_begin;
  for (int begin = t.coord[0]; begin < t.coord[1]; begin += PITCH) {
    const int end = begin + PITCH < t.coord[1] ? begin + PITCH : t.coord[1];
    if (begin != t.coord[0]) ark_sync();
    for (int n = begin; n < end; n += R) {
      float sum[R] = {};
#pragma unroll
      for (int p = 0; p < P; ++p, ++stage) {
        const W* w = reinterpret_cast<const W*>(ark_stage(c, stage));
        ark_slice_dots<R, K / P, V, E>(w + slice, x[p], sum);
        ark_stage_shared_done(c, stage);
      }
      ark_slice_sums(sum, part + ark_warp() * PITCH + n - begin);
    }
    ark_sync();
    float scale = 1.0f;
    if constexpr (N::norm) scale = ark_rsqrt(ark_slices(squares, 1) / K + prologue.eps);
    for (int i = WIDTH * ark_tid(); i < end - begin; i += WIDTH * ARK_THREADS) {
      float sum[WIDTH], ahead[1][WIDTH] = {};
#pragma unroll
      for (int r = 0; r < WIDTH; ++r) sum[r] = scale * ark_slices(part + i + r, PITCH);
      if (!S::WAITS && begin == t.coord[0] && i < WIDTH * ARK_THREADS) {
#pragma unroll
        for (int r = 0; r < WIDTH; ++r) ahead[0][r] = early[0][r];
      } else {
        ark_sums_ahead(c, epilogue, 0, begin + i, WIDTH, ahead);
      }
      ark_sums_store(c, epilogue, 0, begin + i, WIDTH, sum, ahead[0]);
    }
  }
  ark_sums_finish(c, t, epilogue, squares + ARK_WARPS);
}
