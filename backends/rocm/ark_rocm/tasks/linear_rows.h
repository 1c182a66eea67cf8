// Linear layers of one input row whose weights are rows of a quantised matrix. The rows are divided
// among the waves as in linear.h. A lane loads 16 bytes of codes, and their scale by a second load.

// A lane's elements of the input for one part of a row, in registers. Of four neighbouring
// elements, those with even index form one vector and those with odd index another. This is the
// order of the codes in the bytes of fp4 weights.
template <int OWN>
struct ArkSplitInput {
  typedef float Two __attribute__((ext_vector_type(2)));
  Two even[OWN / 4], odd[OWN / 4];
  // Loads the elements of a part from `xs`, the input row in shared memory in the order of
  // SPLIT::place.
  template <class SPLIT>
  ARK_METHOD void take(const float* xs, int part, const SPLIT& split) {
    const float* from = xs + part * SPLIT::SPAN + (split.inside(part) ? split.lane : 0) * 4;
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
      const auto v = *reinterpret_cast<const ark_f32x4*>(from + i * ARK_LANES * 4);
      even[i] = {v[0], v[2]};
      odd[i] = {v[1], v[3]};
    }
  }
};

// Loads the codes of a task's rows of weights, each row cut into parts. Multiplies a lane's codes
// of a part by the input.
template <class ROW, int PARTS>
struct ArkSplitCodes;
template <class C, int K, int GROUP, class S, bool ZEROS, int PARTS>
struct ArkSplitCodes<ArkRow<C, K, GROUP, S, ZEROS>, PARTS> {
  typedef ArkRow<C, K, GROUP, S, ZEROS> Row;
  static constexpr int OWN = 128 / ARK_CODE_BITS<C>, SPAN = ARK_LANES * OWN;
  static constexpr bool WHOLE = K % SPAN == 0;
  static_assert(GROUP % OWN == 0, "a lane's codes share a scale");
  typedef ArkSplitInput<OWN> Input;
  struct Piece {
    ark_u32x4 words;
    float scale;
    float zero;
  };
  const ark_global<unsigned char>* bytes;
  int count;  // number of parts of all rows
  int lane;

  // Past the last part or the row's end, existing data is loaded again. A branch would be slower
  // (see ArkSplitRows).
  ARK_METHOD Piece load(int part) const {
    const int known = part < count ? part : count - 1;
    return load_from(known / PARTS, known);
  }
  // Loads this lane's codes of part `part % PARTS` of row `of`.
  ARK_METHOD Piece load_from(int of, int part) const {
    const int k = within(part);
    const auto* row = bytes + static_cast<ark_i64>(of) * static_cast<ark_i64>(sizeof(Row));
    const auto* scales = (const ark_global<S>*)(row + Row::SCALES_AT);
    const auto* words = (const ark_global<ark_u32x4>*)(row + k / 8 * ARK_CODE_BITS<C>);
    Piece piece{__builtin_nontemporal_load(words), ark_plain(S(scales[k / GROUP])), 0.0f};
    if constexpr (ZEROS) {
      const auto* zeros = (const ark_global<S>*)(row + Row::ZEROS_AT);
      piece.zero = ark_plain(S(zeros[k / GROUP]));
    }
    return piece;
  }
  ARK_METHOD float dot(int part, const Piece& piece, const float* xs) const {
    const float* x = xs + part % PARTS * SPAN + (inside(part) ? lane : 0) * 4;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      constexpr int EACH = ARK_CODES_OF_WORD<C>;
      const ark_f32x4 some = *reinterpret_cast<const ark_f32x4*>(x + i * ARK_LANES);
      float codes[4];
      ark_four_codes(static_cast<const C*>(nullptr), piece.words[i / EACH], i % EACH, codes);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += (ZEROS ? codes[j] - piece.zero : codes[j]) * some[j];
    }
    return inside(part) ? sum * piece.scale : 0.0f;
  }
  ARK_METHOD float dot(int part, const Piece& piece, const Input& input) const {
    typename Input::Two sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      constexpr int EACH = ARK_CODES_OF_WORD<C>;
      float codes[4];
      ark_four_codes(static_cast<const C*>(nullptr), piece.words[i / EACH], i % EACH, codes);
      typename Input::Two even = {codes[0], codes[2]}, odd = {codes[1], codes[3]};
      if constexpr (ZEROS) {
        even -= piece.zero;
        odd -= piece.zero;
      }
      sum += even * input.even[i / 4];
      sum += odd * input.odd[i / 4];
    }
    return inside(part) ? (sum[0] + sum[1]) * piece.scale : 0.0f;
  }
  // True if the lane's codes of a part are inside of the row.
  ARK_METHOD bool inside(int part) const { return WHOLE || part % PARTS * SPAN + lane * OWN < K; }
  ARK_METHOD int within(int part) const {
    const int k = part % PARTS * SPAN + lane * OWN;
    return inside(part) ? k : 0;
  }
  // The index in shared memory of element k of the input. Elements that lanes read at once are
  // neighbours.
  ARK_DEVICE int place(int k) {
    const int in = k % SPAN, own = in % OWN;
    return k - in + own / 4 * (4 * ARK_LANES) + in / OWN * 4 + own % 4;
  }
};

// Copies the input row to its positions in shared memory, multiplied by the norm's weights if there
// are any. Returns the norm's scale. meanwhile: called when the first loads of packets have been
// issued.
template <class SPLIT, int K, class X, class P, class F>
ARK_DEVICE float ark_split_places(ArkCtx& c, X x, const P& prologue, float* xs, float* red,
                                  const F& meanwhile) {
  constexpr int EACH = (K + ARK_THREADS - 1) / ARK_THREADS;
  float v[EACH], squares = 0.0f;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int k = ark_tid() + e * ARK_THREADS;
    v[e] = 1.0f;
    if constexpr (P::norm) v[e] = k < K ? ark_get(prologue.weight.p, k) : 0.0f;
  }
  if constexpr (X::packets) {
    ArkPacketRows<K, 1, false> row;
    row.take(c, x, 0, 0, meanwhile);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const float own = ark_tid() + e * ARK_THREADS < K ? row.v[0][e] : 0.0f;
      squares += own * own;
      v[e] *= own;
    }
  } else {
    meanwhile();
    squares = ark_load_row<false>(c, x, 0, K, xs);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {  // the elements that this thread stored
      const int k = ark_tid() + e * ARK_THREADS;
      if (k < K) v[e] *= xs[k];
    }
    ark_sync();
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int k = ark_tid() + e * ARK_THREADS;
    if (k < K) xs[SPLIT::place(k)] = v[e];
  }
  if constexpr (P::norm) {
    return ark_rsqrt(ark_block_sum(squares, red) / K + prologue.eps);
  } else {
    return 1.0f;
  }
}

// Computes the products of all parts of a task's rows. Each part is computed by one wave. ring: the
// wave's first loads, already issued. input: the input row, in shared memory or in registers.
template <class SPLIT, class INPUT>
ARK_DEVICE void ark_split_sums(const SPLIT& split, typename SPLIT::Piece (&ring)[4],
                               const INPUT& input, float* sums) {
  constexpr int AHEAD = 4;
#pragma unroll 1
  for (int part = ark_warp(); part < split.count; part += AHEAD * ARK_WARPS) {
    float sum[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = part + a * ARK_WARPS;
      sum[a] = split.dot(at, ring[a], input);
      ring[a] = split.load(at + AHEAD * ARK_WARPS);
    }
    const float total = ark_sum_four(sum, split.lane);
    if (split.lane < AHEAD) sums[part + split.lane * ARK_WARPS] = total;
  }
  ark_sync();
}

// Computes a linear layer of one input row for some rows of quantised weights: row t.coord[0] to
// row t.coord[1] - 1, at most ROWS rows. Returns false if a wait has failed or the launch was
// aborted; the processor must then leave the loop.
template <class ROW, int PARTS, int ROWS, class X, class P, class E>
ARK_DEVICE bool ark_linear_split_codes(ArkCtx& c, const ArkTask& t, const unsigned char* bytes, X x,
                                       const P& prologue, E epilogue) {
  typedef ArkSplitCodes<ROW, PARTS> Split;
  constexpr int AHEAD = 4, WIDTH = E::WIDTH, K = ROW::COLUMNS;
  constexpr int FIRST_LINE = AHEAD * ARK_THREADS * 16 / 128, LINES = 2;
  constexpr int OWN = (ROWS / WIDTH + ARK_THREADS - 1) / ARK_THREADS;  // results of a thread
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* sums = xs + PARTS * Split::SPAN;
  float* red = sums + ROWS * PARTS + AHEAD * ARK_WARPS;  // + extra sums of the last round
  const int first = t.coord[0], rows = t.coord[1] - first;
  const Split split{
      ark_to_global(bytes) + static_cast<ark_i64>(first) * static_cast<ark_i64>(sizeof(ROW)),
      rows * PARTS, ark_lane()};
  const int warp = ark_warp();
  typename Split::Piece ring[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) ring[a] = split.load(warp + a * ARK_WARPS);
  if (!ark_enter(c)) return false;
  if (!ark_gate<K>(c, x)) return false;
  float ahead[OWN][1][WIDTH] = {};
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    const int row = (ark_tid() + o * ARK_THREADS) * WIDTH;
    if (row < rows) ark_sums_ahead(c, epilogue, 0, first + row, rows - row, ahead[o]);
  }
  // While the block waits for the input, it prefetches weights into caches: those after the weights
  // of the first loads.
  const ArkLines lines{(const ark_global<char>*)split.bytes,
                       static_cast<int>((rows * sizeof(ROW) + 127u) / 128u)};
  ark_u32 asked[LINES];
  const float scale = ark_split_places<Split, K>(c, x, prologue, xs, red, [&] {
#pragma unroll
    for (int i = 0; i < LINES; ++i) asked[i] = lines.load(FIRST_LINE + i * ARK_THREADS + ark_tid());
  });
  ark_sync();
  ark_split_sums(split, ring, xs, sums);
#pragma unroll
  for (int i = 0; i < LINES; ++i) asm volatile("" ::"v"(asked[i]));
  ark_split_store<PARTS>(c, epilogue, sums, scale, first, rows, ahead);
  ark_sums_finish(c, t, epilogue, red);
  return true;
}
