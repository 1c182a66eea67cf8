// Products of one input row with the weights of chosen experts, in the variant `roles`. Matrix
// units multiply: 16 rows of weights are one operand, and the input is the other. An element of the
// input is the sum of two 16-bit numbers, which are two columns of that operand, so that rounding
// it loses almost nothing. Weights are converted to 16 bits in registers. The warps divide the
// columns of the weights among themselves, and each warp multiplies all rows of a task. A warp
// keeps the weights of its next rows in registers while it multiplies the current ones, so that
// memory is busy all the time. experts.py describes operands and tasks.

// Converts codes to pairs of values of type V. `pair` multiplies them by a scale; the values are
// smaller than code times scale by the factor BACK, so that every scale of MXFP4 up to 2^64 is in
// the range of V. `plain` has no scale; its values are smaller than the codes by the factor
// UP * PLAIN_BACK. The input is multiplied by UP, and the products by PLAIN_BACK.
template <typename V, class C>
struct ArkScaledCodes {
  static constexpr float BACK = 1.0f, UP = 1.0f, PLAIN_BACK = 1.0f;
  ARK_DEVICE ark_u32 factor(float scale) {
    return ark_pack_pair(static_cast<V*>(nullptr), scale, scale);
  }
  ARK_DEVICE ark_u32 pair(ark_u32 word, int j, ark_u32 factor) {
    return ark_both_fma(static_cast<const V*>(nullptr), plain(word, j), factor, 0x80008000u);
  }
  ARK_DEVICE ark_u32 plain(ark_u32 word, int j) {
    return ark_code_pair_as(static_cast<const V*>(nullptr), static_cast<const C*>(nullptr), word,
                            j);
  }
};
// Exponent and mantissa of a code are moved to those of a bf16, which gives a number that is too
// small by a factor of 2^126. The code 0.5 becomes a subnormal number. A multiplication copies a
// code to the places of its sign and of its other bits at once, without a carry.
template <>
struct ArkScaledCodes<ark_bf16, ark_fp4> {
  static constexpr float BACK = 18446744073709551616.0f;                  // 2^64
  static constexpr float UP = BACK, PLAIN_BACK = 4611686018427387904.0f;  // 2^62
  ARK_DEVICE ark_u32 factor(float scale) {
    const float by = scale * PLAIN_BACK;
    return ark_pack_pair(static_cast<ark_bf16*>(nullptr), by, by);
  }
  ARK_DEVICE ark_u32 pair(ark_u32 word, int j, ark_u32 factor) {
    return ark_both_fma(static_cast<const ark_bf16*>(nullptr), plain(word, j), factor, 0x80008000u);
  }
  ARK_DEVICE ark_u32 plain(ark_u32 word, int j) {
    const ark_u32 codes = j < 2 ? word : word >> 8;
    const ark_u32 twice = j % 2 == 0 ? (codes & 0x000f000fu) * 0x1040u  // to bits 6 and 12
                                     : (codes & 0x00f000f0u) * 0x0104u;
    return twice & 0x81c081c0u;
  }
};

// Reads rows in pieces of 16 bytes, of CODES weights each. V: the type of the values. AFTER: true
// if four neighbouring pieces have one scale, so that their sums are scaled. scale(row, piece): the
// bits of a piece's scale; number(scale): its value. pair(piece, j, factor): values 2 j and 2 j + 1
// of a piece; factor(scale): what this function needs of the scale. plain(piece, j): these values
// without a scale, as ArkScaledCodes gives them. SHARED: true if each piece has a scale of 16 bits,
// so that the four lanes of a row load the scales of both of their rows as one word each;
// scales(row, piece): the word with those of an even piece and of the next one.
template <class ROW, typename V>
struct ArkUnitsRow;
template <typename V, int K>
struct ArkUnitsRow<ArkFloatRow<V, K>, V> {
  static constexpr int COLUMNS = K, CODES = 8;
  static constexpr bool AFTER = false, SHARED = false;
  static constexpr float BACK = 1.0f;
  ARK_DEVICE ark_u32 scale(const unsigned char*, int) { return 0u; }
  ARK_DEVICE ark_u32 scales(const unsigned char*, int) { return 0u; }
  ARK_DEVICE float number(ark_u32) { return 1.0f; }
  ARK_DEVICE ark_u32 factor(ark_u32) { return 0u; }
  ARK_DEVICE ark_u32 pair(const ark_u32 (&piece)[4], int j, ark_u32) { return piece[j]; }
};
template <class C, int K, int GROUP, class S, typename V>
struct ArkUnitsRow<ArkRow<C, K, GROUP, S, false>, V> {
  typedef ArkRow<C, K, GROUP, S, false> Row;
  typedef ArkScaledCodes<V, C> Codes;

  static constexpr int COLUMNS = K, CODES = 128 / ARK_CODE_BITS<C>;
  static constexpr int PAIRS = 16 / ARK_CODE_BITS<C>;  // of a word
  static constexpr bool AFTER = GROUP == K || GROUP % (4 * CODES) == 0;
  static constexpr float BACK = AFTER ? 1.0f : Codes::BACK;
  static constexpr bool SHARED = GROUP == CODES && sizeof(S) == 2 && K / CODES % 2 == 0 &&
                                 Row::SCALES_AT % 4 == 0 && sizeof(Row) % 4 == 0;
  static_assert(K % CODES == 0 && GROUP % CODES == 0, "a piece has one scale");
  ARK_DEVICE ark_u32 scales(const unsigned char* row, int piece) {
    return __ldcs(reinterpret_cast<const ark_u32*>(row + Row::SCALES_AT + piece * 2));
  }
  ARK_DEVICE ark_u32 scale(const unsigned char* row, int piece) {
    const S* from = reinterpret_cast<const S*>(row + Row::SCALES_AT) + piece * CODES / GROUP;
    if constexpr (sizeof(S) == 2) return __ldcs(reinterpret_cast<const unsigned short*>(from));
    if constexpr (sizeof(S) == 4) return __ldcs(reinterpret_cast<const ark_u32*>(from));
  }
  ARK_DEVICE float number(ark_u32 scale) {
    const unsigned short half = static_cast<unsigned short>(scale);
    if constexpr (sizeof(S) == 2) return ark_get(reinterpret_cast<const S*>(&half), 0);
    if constexpr (sizeof(S) == 4) return ark_bits_float(scale);
  }
  ARK_DEVICE ark_u32 factor(ark_u32 scale) { return AFTER ? 0u : Codes::factor(number(scale)); }
  ARK_DEVICE ark_u32 pair(const ark_u32 (&piece)[4], int j, ark_u32 factor) {
    const ark_u32 word = piece[j / PAIRS];
    const V* type = nullptr;
    if constexpr (AFTER) {
      return ark_code_pair_as(type, static_cast<const C*>(nullptr), word, j % PAIRS);
    } else {
      return Codes::pair(word, j % PAIRS, factor);
    }
  }
  ARK_DEVICE ark_u32 plain(const ark_u32 (&piece)[4], int j) {
    return Codes::plain(piece[j / PAIRS], j % PAIRS);
  }
};

// The weights of one step of a warp, UNITS pieces per lane of each of two rows (`lane` / 4, and the
// eighth row after it), and their scales.
template <int UNITS, bool SHARED>
struct ArkUnitsStep {
  ark_u32 piece[UNITS][2][4], scale[UNITS][SHARED ? 1 : 2];
};

// True if numbers of type V need a common factor because their range is small.
template <typename V>
constexpr bool ARK_NEEDS_FACTOR = true;
template <>
inline constexpr bool ARK_NEEDS_FACTOR<ark_bf16> = false;

// N pairs of a lane's elements of the input, which are loaded while the warp goes on. Packets that
// come later than the load are late.
template <int N, typename P>
struct ArkUnitsAsked {
  float seen[2 * N] = {};
  template <typename There, typename At>
  ARK_DEVICE_MEMBER void load(ArkCtx& c, const There& there, const At& at, bool system) {
    ark_load_pairs<N>(c, at(0), there, at, seen, system);
  }
  ARK_DEVICE_MEMBER float value(int i) const { return seen[i]; }
  ARK_DEVICE_MEMBER bool late(const ArkCtx&, int) const { return false; }
};
template <int N>
struct ArkUnitsAsked<N, ark_u64> {
  ark_u64 seen[2 * N] = {};
  template <typename There, typename At>
  ARK_DEVICE_MEMBER void load(ArkCtx&, const There& there, const At& at, bool system) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      seen[2 * n] = seen[2 * n + 1] = 0u;
      if (there(n)) ark_packets_load(at(n), seen[2 * n], seen[2 * n + 1], system);
    }
  }
  ARK_DEVICE_MEMBER float value(int i) const {
    return ark_bits_float(static_cast<ark_u32>(seen[i]));
  }
  ARK_DEVICE_MEMBER bool late(const ArkCtx& c, int i) const {
    return !ark_packet_ready(c, seen[i]);
  }
};

template <int N, typename P>
ARK_DEVICE ArkUnitsAsked<N, P> ark_units_asked(const P*) {
  return {};
}

// The input's SPAN elements of a warp's part of the columns, of which each lane has some pairs.
// `load` begins to load them, `settle` waits for them, and `store` stores them to shared memory as
// two 16-bit numbers each: all first numbers, then all second ones. fp16 numbers are scaled by a
// power of two; `store` returns its inverse.
template <int SPAN, int K, typename V, typename P>
struct ArkUnitsInput {
  static constexpr int PAIRS = (SPAN + 63) / 64;
  ArkUnitsAsked<PAIRS, P> asked;
  float v[2 * PAIRS] = {};
  bool late = false;
  ARK_DEVICE int place(int n) { return 2 * (n * ARK_LANES + ark_lane()); }
  ARK_DEVICE bool there(int n, int column) { return place(n) < SPAN && column + place(n) < K; }
  ARK_DEVICE_MEMBER void load(ArkCtx& c, const P* from, int column, bool system) {
    const auto has = [&](int n) { return there(n, column); };
    asked.load(c, has, [&](int n) { return from + column + place(n); }, system);
  }
  ARK_DEVICE_MEMBER void settle(const ArkCtx& c, int column) {
    late = false;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
      v[i] = asked.value(i);
      late = late || (there(i / 2, column) && asked.late(c, i));
    }
  }
  ARK_DEVICE_MEMBER float store(ArkCtx& c, const P* from, int column, bool system, ark_u32* to) {
    if (__any_sync(0xffffffffu, late)) {
      const auto has = [&](int n) { return there(n, column); };
      const auto at = [&](int n) { return from + column + place(n); };
      ark_load_pairs<PAIRS>(c, from, has, at, v, system);
    }
    float by = 1.0f, back = 1.0f;
    if constexpr (ARK_NEEDS_FACTOR<V>) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; ++i) most = fmaxf(most, fabsf(v[i]));
      by = ark_block_factor(ark_warp_max(most), back);
    }
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int word = n * ARK_LANES + ark_lane();
      const float a = v[2 * n] * by, b = v[2 * n + 1] * by;
      const ark_u32 high = ark_pack_pair(static_cast<V*>(nullptr), a, b);
      const float2 known = ark_pair(static_cast<const V*>(nullptr), high);
      if (word >= SPAN / 2) continue;
      to[word] = high;
      to[SPAN / 2 + word] = ark_pack_pair(static_cast<V*>(nullptr), a - known.x, b - known.y);
    }
    return back;
  }
};
template <int SPAN, int K, typename V, typename P>
ARK_DEVICE ArkUnitsInput<SPAN, K, V, P> ark_units_input(const P*) {
  return {};
}

// Stores the numbers of the experts of ADDED slots (a row's chosen experts). All warps store the
// same numbers.
template <int ADDED, int OF, class E>
ARK_DEVICE void ark_experts_chosen(ArkCtx& c, int row, int first_slot, const E& experts,
                                   int* chosen) {
  if (ark_lane() < ADDED) {
    int expert = *ark_address(experts, 0, 0, row, first_slot + ark_lane());
    if (expert < 0 || expert >= OF) {
      if (ark_warp() == 0) {
        ark_fail(c, 5u, 0u, static_cast<ark_u32>(OF), static_cast<ark_u32>(expert));
      }
      expert = 0;
    }
    chosen[ark_lane()] = expert;
  }
  __syncwarp();
}

// The epilogue of tasks whose sums are in shared memory: PARTS sums of each output, one after the
// other (part, slot, weight, output of CHUNK), are added up first. `ahead` loads the numbers that a
// thread's first output needs; `store` computes and stores `count` outputs, from `top` on.
template <int WEIGHTS, int TOTAL, int PARTS, int CHUNK, class F>
struct ArkExpertEnd {
  static constexpr int ADDED = TOTAL > 0 ? TOTAL : 1;
  // Without values from the start, ptxas would keep registers for them in the whole kernel.
  float with[F::EXTRA] = {}, left = 0.0f;
  ARK_DEVICE_MEMBER void ahead(const F& finish, const int* chosen, int row, int first_slot, int top,
                               int count) {
    const int output = ark_tid() % CHUNK, slot = ark_tid() / CHUNK;
    if (slot < ADDED && output < count) {
      finish.ahead(row, first_slot + slot, chosen[slot], top + output, with);
    }
    if (TOTAL > 0 && ark_tid() < count) left = finish.left(row, top + ark_tid());
  }
  ARK_DEVICE_MEMBER void store(const F& finish, const int* chosen, int row, int first_slot, int top,
                               int count, const float* sums, float* totals) {
    ark_sync();
    for (int i = ark_tid(); i < ADDED * CHUNK; i += ARK_THREADS) {
      const int n = i % CHUNK, s = i / CHUNK;
      if (n >= count) continue;
      float sum[WEIGHTS];
#pragma unroll
      for (int w = 0; w < WEIGHTS; ++w) {
        sum[w] = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          sum[w] += sums[((p * ADDED + s) * WEIGHTS + w) * CHUNK + n];
        }
      }
      if (i != ark_tid()) finish.ahead(row, first_slot + s, chosen[s], top + n, with);
      const float v = finish.term(sum, with);
      if (TOTAL > 0) totals[i] = v;
      if (TOTAL == 0) finish.store(row, first_slot, top + n, v);
    }
    if (TOTAL == 0) return;
    ark_sync();
    for (int n = ark_tid(); n < count; n += ARK_THREADS) {
      float v = 0.0f;
      for (int s = 0; s < ADDED; ++s) v += totals[s * CHUNK + n];
      if (n != ark_tid()) left = finish.left(row, top + n);
      finish.store(row, 0, top + n, v + left);
    }
  }
};

// The steps of a batch, whose weights a warp loads together.
template <int UNITS>
constexpr int ARK_UNITS_BATCH = UNITS > 1 ? 2 : 3;

// Like ark_expert_products of experts.h. An item is SPAN (UNITS times four pieces) columns of the
// weights of one slot. The warps take items in turn, and a step of a warp is 16 rows of its item.
// Each warp adds up its items' products in shared memory; then threads add the sums of all warps
// and apply the epilogue. CHUNK: the number of outputs whose sums shared memory holds at once.
template <class ROW, typename V, int N, bool SLOTS, int OF, int WEIGHTS, int TOTAL, int UNITS,
          int CHUNK, class X, class E, class F>
ARK_DEVICE void ark_expert_units(ArkCtx& c, const ArkTask& t, X x, const unsigned char* first,
                                 const unsigned char* second, E experts, const F& finish) {
  typedef ArkUnitsRow<ROW, V> Reader;
  constexpr int K = Reader::COLUMNS, CODES = Reader::CODES, SPAN = UNITS * 4 * CODES;
  constexpr int ADDED = TOTAL > 0 ? TOTAL : 1, ROWS = CHUNK * WEIGHTS;
  constexpr int BATCH = ARK_UNITS_BATCH<UNITS>;
  constexpr int PARTS = (K + SPAN - 1) / SPAN, ITEMS = ADDED * PARTS;
  typedef ArkUnitsStep<UNITS, Reader::SHARED> Step;
  static_assert(static_cast<ark_i64>(N) * sizeof(ROW) < 1ll << 31, "offsets have 32 bits");
  const V* type = nullptr;
  const int row = t.coord[0], begin = t.coord[2], end = t.coord[3];
  const int lane = ark_lane(), own_row = lane / 4, own_piece = lane % 4;
  const int first_slot = TOTAL > 0 ? 0 : t.coord[1];
  ark_u32* inputs = reinterpret_cast<ark_u32*>(ARK_SCRATCH(c)) + ark_warp() * SPAN;
  float* sums = reinterpret_cast<float*>(ARK_SCRATCH(c)) + ARK_WARPS * SPAN;
  float* own = sums + ark_warp() * (ADDED * ROWS);
  float* totals = sums + ARK_WARPS * ADDED * ROWS;
  int* chosen = reinterpret_cast<int*>(totals + (TOTAL > 0 ? ADDED * CHUNK : 0));
  ark_experts_chosen<ADDED, OF>(c, row, first_slot, experts, chosen);
  const auto rows_of = [&](int slot, int w) {
    return (w > 0 ? second : first) + chosen[slot] * static_cast<ark_i64>(N * sizeof(ROW));
  };
  for (int top = begin; top < end; top += CHUNK) {
    const int count = top + CHUNK < end ? CHUNK : end - top;
    const int tiles = (count + 15) / 16 * WEIGHTS;
    const auto load = [&](Step& to, int item, int tile) {
      const unsigned char* rows = rows_of(item / PARTS, tile % WEIGHTS);
      const int low = top + tile / WEIGHTS * 16 + own_row;
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        // Behind the last piece the input is zero, so any piece may be loaded, but together with
        // its own scale: with another one, values might be infinite, whose products with zero are
        // NaN.
        const int at = (item % PARTS * UNITS + u) * 4 + own_piece;
        const int other = K / CODES - (Reader::SHARED ? 2 - own_piece % 2 : 1);
        const int p = K % SPAN == 0 || at < K / CODES ? at : other;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = low + 8 * half < end ? low + 8 * half : end - 1;
          const unsigned char* from = rows + own * static_cast<int>(sizeof(ROW));
          const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from) + p);
          ark_u32(&piece)[4] = to.piece[u][half];
          piece[0] = v.x, piece[1] = v.y, piece[2] = v.z, piece[3] = v.w;
          if constexpr (!Reader::SHARED) to.scale[u][half] = Reader::scale(from, p);
        }
        if constexpr (Reader::SHARED) {
          const int own = low + own_piece / 2 * 8 < end ? low + own_piece / 2 * 8 : end - 1;
          const int even = (item % PARTS * UNITS + u) * 4 + own_piece % 2 * 2;
          to.scale[u][0] = Reader::scales(rows + own * static_cast<int>(sizeof(ROW)),
                                          even < K / CODES ? even : K / CODES - 2);
        }
      }
    };
    const auto given = [&](int item) {
      const int slot = first_slot + item / PARTS;
      return SLOTS ? ark_address(x, 0, row, slot, 0) : ark_address(x, 0, 0, row, 0);
    };
    const auto column = [&](int item) { return item % PARTS * SPAN; };
    auto input = ark_units_input<SPAN, K, V>(given(0));
    // Without values from the start, ptxas would keep registers for them in the whole kernel.
    Step now[BATCH] = {}, next[BATCH] = {};
    int item = ark_warp(), tile = 0, next_item = item, next_tile = 0, asked = item;
    const auto load_next = [&](Step& to) {
      if (next_item >= ITEMS) return;
      load(to, next_item, next_tile);
      if (++next_tile == tiles) next_tile = 0, next_item += ARK_WARPS;
    };
#pragma unroll
    for (int h = 0; h < BATCH; ++h) load_next(next[h]);
    if (asked < ITEMS) input.load(c, given(asked), column(asked), X::system);
    ArkExpertEnd<WEIGHTS, TOTAL, ARK_WARPS, CHUNK, F> last;
    last.ahead(finish, chosen, row, first_slot, top, count);
    for (int i = lane; i < ADDED * ROWS; i += ARK_LANES) own[i] = 0.0f;
    __syncwarp();
    // Where the input's elements for this lane's pieces are: columns 0 and 1 of the operand are the
    // first and the second numbers, and the other columns are not used.
    const ark_u32* mine = inputs + own_row % 2 * (SPAN / 2) + own_piece * (CODES / 2);
    float back = 1.0f;
    // ptxas waits for all loads of this loop before it uses the result of any of them. So a batch
    // is moved to other registers, which waits for it, before the next one is loaded.
#pragma unroll 1
    while (item < ITEMS) {
#pragma unroll
      for (int h = 0; h < BATCH; ++h) now[h] = next[h];
      input.settle(c, column(asked));
#pragma unroll
      for (int h = 0; h < BATCH; ++h) load_next(next[h]);
#pragma unroll
      for (int h = 0; h < BATCH; ++h) {
        if (item >= ITEMS) break;
        if (tile == 0) {
          __syncwarp();  // all lanes have read the previous item's input
          back = input.store(c, given(item), column(item), X::system, inputs) * Reader::BACK;
          __syncwarp();
          asked = item + ARK_WARPS;
          if (asked < ITEMS) input.load(c, given(asked), column(asked), X::system);
          if (h + 1 < BATCH && tiles < BATCH - h) input.settle(c, column(asked));
        }
        float all[4] = {};
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
          ark_u32 bits[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if constexpr (Reader::SHARED) {
              const int from = lane - own_piece + half * 2 + own_piece / 2;
              bits[half] = __shfl_sync(0xffffffffu, now[h].scale[u][0], from);
              bits[half] = own_piece % 2 > 0 ? bits[half] >> 16 : bits[half] & 0xffffu;
            } else {
              bits[half] = now[h].scale[u][half];
            }
          }
          const ark_u32(&low)[4] = now[h].piece[u][0];
          const ark_u32(&high)[4] = now[h].piece[u][1];
          const ark_u32 by[2] = {Reader::factor(bits[0]), Reader::factor(bits[1])};
          float d[2][4] = {};
#pragma unroll
          for (int i = 0; i < CODES / 4; i += 2) {
            const uint4 b = *reinterpret_cast<const uint4*>(mine + u * 2 * CODES + 2 * i);
            const auto a = [&](const ark_u32(&piece)[4], int j, ark_u32 factor) {
              return Reader::pair(piece, 2 * i + j, factor);
            };
            ark_mma(d[0], a(low, 0, by[0]), a(high, 0, by[1]), a(low, 1, by[0]), a(high, 1, by[1]),
                    b.x, b.y, type);
            ark_mma(d[1], a(low, 2, by[0]), a(high, 2, by[1]), a(low, 3, by[0]), a(high, 3, by[1]),
                    b.z, b.w, type);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float sum = d[0][e] + d[1][e];
            all[e] = Reader::AFTER ? fmaf(sum, Reader::number(bits[e / 2]), all[e]) : all[e] + sum;
          }
        }
        // The first two columns have the products with both numbers of each element of the input.
        if (own_piece == 0) {
          float* to = own + (item / PARTS * WEIGHTS + tile % WEIGHTS) * CHUNK +
                      tile / WEIGHTS * 16 + own_row;
          to[0] = fmaf(all[0] + all[1], back, to[0]);
          to[8] = fmaf(all[2] + all[3], back, to[8]);
        }
        if (++tile == tiles) tile = 0, item += ARK_WARPS;
      }
    }
    last.store(finish, chosen, row, first_slot, top, count, sums, totals);
    if (top + CHUNK < end) ark_sync();  // the next chunk's sums take the same memory
  }
}
