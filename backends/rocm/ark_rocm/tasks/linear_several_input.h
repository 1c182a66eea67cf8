// The input of linear layers of several rows (linear_several.h). A lane loads its elements of a
// chunk along k and converts them to operands of the matrix units.

// The number of elements of k that a product multiplies in each of its 16 columns.
constexpr int ARK_STEP = 32;

// The number of elements of k in a chunk. ROWS: the input rows of a product. With 8 rows a chunk
// has two halves. STEPS: the products of a chunk.
constexpr int ark_chunk_span(int rows, int steps) { return ARK_STEP * steps * 16 / rows; }

// The number of products (matrix instructions along k) in a chunk: 4, or 2 if this divides the work
// better. The chunks of a row of k elements are divided among waves. 2 is returned if the wave with
// the most elements then has fewer elements than with 4.
constexpr int ark_chunk_steps(int k, int rows) {
  const int four = ARK_WARPS * ark_chunk_span(rows, 4), two = four / 2;
  return (k + two - 1) / two < (k + four - 1) / four * 2 ? 2 : 4;
}

// Returns the index of an element in a row of K elements. The element is at position `place` of the
// given chunk. W: the weights. For positions past the row's end, returns the index of an existing
// element.
template <int K, class W>
ARK_DEVICE int ark_chunk_at(int chunk, int place) {
  constexpr int SPAN = ark_chunk_span(W::ROWS, W::STEPS);
  const int begin = chunk * SPAN;
  if constexpr (K % SPAN == 0) return (begin < K ? begin : 0) + place;
  return begin + place < K ? begin + place : 0;
}

// Splits eight floats of the input into parts with 8 bits of the significand, as operands of the
// products. The parts of infinite floats must then be corrected (ark_several_infinite).
template <class W, int PARTS>
ARK_DEVICE void ark_several_parts(const float (&v)[8], ark_u32x4 (&to)[PARTS]) {
  float rest[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) rest[e] = v[e];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      to[p][e / 2] = ark_upper_pair(rest[W::order(e)], rest[W::order(e + 1)]);
    }
    // Subtracts the parts from two floats at once, for which there is one instruction.
    typedef float Pair __attribute__((ext_vector_type(2)));
    typedef ark_u32 Bits __attribute__((ext_vector_type(2)));
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const Pair two = {rest[e], rest[e + 1]};
      const Bits upper = __builtin_bit_cast(Bits, two) & 0xffff0000u;
      const Pair left = two - __builtin_bit_cast(Pair, upper);
#pragma unroll
      for (int i = 0; i < 2; ++i) rest[e + i] = left[i];
    }
  }
}

// Sets the further parts of floats whose first part is infinite or NaN to zero.
template <int PARTS>
ARK_DEVICE void ark_several_infinite(ark_u32x4 (&parts)[PARTS]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const ark_u32 low = (parts[0][w] & 0x7f80u) == 0x7f80u ? 0u : 0xffffu;
    const ark_u32 high = (parts[0][w] & 0x7f800000u) == 0x7f800000u ? 0u : 0xffff0000u;
#pragma unroll
    for (int p = 1; p < PARTS; ++p) parts[p][w] &= low | high;
  }
}

// A lane's elements of a chunk of input row m. One method issues the loads, another returns the
// elements. ALIGNED: true if rows begin at multiples of 16 bytes and their elements are contiguous.
// STEPS: the products of a chunk.
template <class X, bool ALIGNED, int STEPS>
struct ArkSeveralInput {
  static constexpr bool BF16 = false;
  float v[STEPS][8];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx& c, const X& x, int m, int chunk, const W& weights) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int from = ark_chunk_at<K, W>(chunk, weights.place(s));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        v[s][e] = ark_load(c, x, 0, 0, m, from + e);
      }
    }
  }
  template <class W>
  ARK_METHOD void take(int s, const W&, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e] = v[s][e];
  }
};
// With 8 rows in a product, the two lanes of a pair need different halves of a chunk. Each lane
// loads elements for both and then they exchange them, so that each load of the wave covers whole
// cache lines.
template <ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM, int STEPS>
struct ArkSeveralInput<ArkOperand<const float, S0, S1, S2, S3, SYSTEM>, true, STEPS> {
  static constexpr bool BF16 = false;
  ark_f32x4 v[STEPS][2];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const float, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, const W& weights) {
    const auto* base = (const ark_global<char>*)ark_address(x, 0, 0, 0, 0);
    const int row = m * static_cast<int>(S2);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = W::ROWS == 8 ? weights.place(s, i) + weights.lane / 8 % 2 * 4
                                       : weights.place(s) + i * 4;
        const int at = row + ark_chunk_at<K, W>(chunk, place);
        v[s][i] = *(const ark_global<ark_f32x4>*)(base + static_cast<ark_u32>(at) * 4u);
      }
    }
  }
  template <class W>
  ARK_METHOD void take(int s, const W&, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = v[s][0][e], high = v[s][1][e];
      // row_ror 8; the last argument selects groups of four lanes
      to[e] = W::ROWS == 8 ? ark_row_move<0x128, 0xc>(low, high) : low;
      to[e + 4] = W::ROWS == 8 ? ark_row_move<0x128, 0x3>(high, low) : high;
    }
  }
};
template <ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM, int STEPS>
struct ArkSeveralInput<ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>, true, STEPS> {
  static constexpr bool BF16 = true;
  typedef ark_u32 Words __attribute__((ext_vector_type(4)));
  Words v[STEPS];

  template <int K, class W>
  ARK_METHOD void ask(ArkCtx&, const ArkOperand<const ark_bf16, S0, S1, S2, S3, SYSTEM>& x, int m,
                      int chunk, const W& weights) {
    const auto* base = (const ark_global<char>*)ark_address(x, 0, 0, 0, 0);
    const int row = m * static_cast<int>(S2);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = row + ark_chunk_at<K, W>(chunk, weights.place(s));
      v[s] = *(const ark_global<Words>*)(base + static_cast<ark_u32>(at) * 2u);
    }
  }
  template <class W>
  ARK_METHOD void take(int s, const W&, float (&to)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const ark_u32 pair = v[s][e / 2];
      to[e] = ark_bits_float(e % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
  }
};

// Loads the norm's weights for the same elements of a row that ArkSeveralInput loads.
template <class P, int STEPS, bool NORM = P::norm>
struct ArkSeveralFactors {
  template <int K, class W>
  ARK_METHOD void ask(const P&, int, const W&) {}
  ARK_DEVICE float at(int, int) { return 1.0f; }
};
template <class P, int STEPS>
struct ArkSeveralFactors<P, STEPS, true> {
  float v[STEPS][8];

  template <int K, class W>
  ARK_METHOD void ask(const P& prologue, int chunk, const W& weights) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int from = ark_chunk_at<K, W>(chunk, weights.place(s));
#pragma unroll
      for (int e = 0; e < 8; ++e) v[s][e] = ark_get(prologue.weight.p, from + e);
    }
  }
  ARK_METHOD float at(int s, int e) const { return v[s][e]; }
};
