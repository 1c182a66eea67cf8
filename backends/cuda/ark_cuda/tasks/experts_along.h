// Products of one input row with the quantised weights of chosen experts, in the variant `roles`,
// for weights of which each piece of 16 bytes has a scale (MXFP4). In experts_units.h a warp reads
// 64 bytes of each of 16 rows, and the bytes that follow them are another warp's. Here a warp takes
// 16 rows, or a part of their columns, and moves along them. Memory delivers neighbouring bytes of
// a row faster than those of many rows, and sums stay in registers.
//
// Codes are multiplied without their scales, which saves an instruction for each two. For this,
// matrix units add up each piece by itself: the input of piece q of four is in columns 2 q and
// 2 q + 1 of their operand, so that a lane gets the sums of its own pieces and multiplies them by
// the scales. Codes of MXFP4 are then bf16 numbers below 2^-123, and the code 0.5 is a subnormal
// number, which mma has to multiply exactly. PTX calls subnormal operands of mma unspecified, so
// tests/codegen/test_cuda_experts.py compares such products with NumPy on a GPU. experts.py
// describes operands and tasks.

// The input of a slot (one of the row's chosen experts) in shared memory, as two 16-bit numbers of
// each element. A unit has CODES * 4 elements: first all first numbers, then all second ones, which
// begin at other banks.
template <int CODES>
struct ArkAlongUnit {
  static constexpr int HALF = 2 * CODES, SECOND = HALF + 4, WORDS = SECOND + HALF + 4;
};

// Like ark_expert_products of experts.h. PARTS: the number of parts into which the columns of a row
// are divided. Warp w takes part w % PARTS of 16 rows. CHUNK: the outputs of a task, rounded up to
// 16. BATCH: the units whose weights a warp loads together.
template <class ROW, typename V, int N, bool SLOTS, int OF, int WEIGHTS, int TOTAL, int PARTS,
          int CHUNK, int BATCH, class X, class E, class F>
ARK_DEVICE void ark_expert_along(ArkCtx& c, const ArkTask& t, X x, const unsigned char* first,
                                 const unsigned char* second, E experts, const F& finish) {
  typedef ArkUnitsRow<ROW, V> Reader;
  typedef typename Reader::Codes Codes;
  typedef ArkAlongUnit<Reader::CODES> Unit;
  constexpr int K = Reader::COLUMNS, CODES = Reader::CODES, COLUMNS = 4 * CODES;
  constexpr int ADDED = TOTAL > 0 ? TOTAL : 1, TILES = CHUNK / 16 * WEIGHTS;
  constexpr int UNITS = (K + COLUMNS - 1) / COLUMNS, EACH = (UNITS + PARTS - 1) / PARTS;
  constexpr int BYTES = static_cast<int>(sizeof(ROW)), LAST = K / CODES - 1;
  typedef ArkUnitsStep<1, true> Step;
  static_assert(Reader::SHARED, "each piece has a scale of 16 bits");
  static_assert(TILES * PARTS <= ARK_WARPS, "a warp has 16 rows");
  static_assert(static_cast<ark_i64>(N) * BYTES < 1ll << 31, "offsets have 32 bits");
  const V* type = nullptr;
  const int row = t.coord[0], begin = t.coord[2], end = t.coord[3], count = end - begin;
  const int lane = ark_lane(), own_row = lane / 4, own_piece = lane % 4;
  const int first_slot = TOTAL > 0 ? 0 : t.coord[1];
  ark_u32* inputs = reinterpret_cast<ark_u32*>(ARK_SCRATCH(c));
  float* sums = reinterpret_cast<float*>(inputs + UNITS * Unit::WORDS);
  float* totals = sums + ADDED * PARTS * CHUNK * WEIGHTS;
  int* chosen = reinterpret_cast<int*>(totals + (TOTAL > 0 ? ADDED * CHUNK : 0));
  // Zeros in place of the input, as many as a lane reads of a unit. All warps store them.
  ark_u32* nothing = reinterpret_cast<ark_u32*>(chosen + 8);
  if (lane < CODES / 2) nothing[lane] = 0u;
  ark_experts_chosen<ADDED, OF>(c, row, first_slot, experts, chosen);

  // This warp's rows and units.
  const bool works = ark_warp() < TILES * PARTS;
  const int tile = ark_warp() / PARTS, from_unit = ark_warp() % PARTS * EACH;
  const int to_unit = !works ? from_unit : from_unit + EACH < UNITS ? from_unit + EACH : UNITS;
  const int low_row = begin + tile / WEIGHTS * 16 + own_row, high_row = low_row + 8;
  const int low = (low_row < end ? low_row : end - 1) * BYTES;
  const int high = (high_row < end ? high_row : end - 1) * BYTES;
  const int scaled = own_piece / 2 > 0 ? high : low;
  const unsigned char* weights = tile % WEIGHTS > 0 ? second : first;
  Step now[BATCH] = {}, next[BATCH] = {};
  int next_slot = 0, next_unit = from_unit;
  const auto load_next = [&] {
    if (next_slot >= ADDED || !works) return;
    const unsigned char* from = weights + chosen[next_slot] * static_cast<ark_i64>(N * BYTES);
#pragma unroll
    for (int h = 0; h < BATCH; ++h) {
      if (next_unit + h >= to_unit) break;
      // Behind the last piece the input is zero, so any weights may be loaded.
      const int own = (next_unit + h) * 4 + own_piece, even = own - own_piece + own_piece % 2 * 2;
      const int p = K % COLUMNS == 0 || own < LAST ? own : LAST;
      const int q = K % COLUMNS == 0 || even < LAST ? even : LAST - 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned char* at = from + (half > 0 ? high : low);
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(at) + p);
        ark_u32(&piece)[4] = next[h].piece[0][half];
        piece[0] = v.x, piece[1] = v.y, piece[2] = v.z, piece[3] = v.w;
      }
      next[h].scale[0][0] = Reader::scales(from + scaled, q);
    }
    next_unit += BATCH;
    if (next_unit >= to_unit) next_unit = from_unit, ++next_slot;
  };

  // The input of a slot: each thread has some pairs.
  constexpr int PAIRS = (UNITS * COLUMNS / 2 + ARK_THREADS - 1) / ARK_THREADS;
  const auto given = [&](int slot) {
    return SLOTS ? ark_address(x, 0, row, first_slot + slot, 0) : ark_address(x, 0, 0, row, 0);
  };
  const auto place = [&](int n) { return 2 * (ark_tid() + n * ARK_THREADS); };
  const auto there = [&](int n) { return place(n) < K; };
  auto asked = ark_units_asked<PAIRS>(given(0));
  const auto ask = [&](int slot) {
    const auto* from = given(slot);
    asked.load(c, there, [&](int n) { return from + place(n); }, X::system);
  };
  const auto store = [&](int slot) {
    const auto* from = given(slot);
    float v[2 * PAIRS];
    bool late = false;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
      v[i] = there(i / 2) ? asked.value(i) : 0.0f;
      late = late || (there(i / 2) && asked.late(c, i));
    }
    if (__any_sync(0xffffffffu, late)) {
      ark_load_pairs<PAIRS>(c, from, there, [&](int n) { return from + place(n); }, v, X::system);
    }
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      if (place(n) >= UNITS * COLUMNS) continue;
      const float a = v[2 * n] * Codes::UP, b = v[2 * n + 1] * Codes::UP;
      const ark_u32 high = ark_pack_pair(static_cast<V*>(nullptr), a, b);
      const float2 known = ark_pair(static_cast<const V*>(nullptr), high);
      ark_u32* to = inputs + place(n) / COLUMNS * Unit::WORDS + place(n) % COLUMNS / 2;
      to[0] = high;
      to[Unit::SECOND] = ark_pack_pair(static_cast<V*>(nullptr), a - known.x, b - known.y);
    }
  };

  load_next();
  ask(0);
  ArkExpertEnd<WEIGHTS, TOTAL, PARTS, CHUNK, F> last;
  last.ahead(finish, chosen, row, first_slot, begin, count);
  // Where the input's elements for this lane's pieces are. The columns of other pieces are zeros.
  const bool zeros = own_row / 2 != own_piece;
  const ark_u32* mine =
      zeros ? nothing : inputs + own_row % 2 * Unit::SECOND + own_piece * (CODES / 2);
#pragma unroll 1
  for (int slot = 0; slot < ADDED; ++slot) {
    if (slot > 0) ark_sync();  // all warps have read the previous slot's input
    store(slot);
    ark_sync();
    if (slot + 1 < ADDED) ask(slot + 1);
    float all[4] = {};
    // ptxas waits for all loads of this loop before it uses the result of any of them. So a batch
    // is moved to other registers, which waits for it, before the next one is loaded.
#pragma unroll 1
    for (int top = from_unit; top < to_unit; top += BATCH) {
#pragma unroll
      for (int h = 0; h < BATCH; ++h) now[h] = next[h];
      load_next();
#pragma unroll
      for (int h = 0; h < BATCH; ++h) {
        if (top + h >= to_unit) break;
        const ark_u32* own = mine + (zeros ? 0 : (top + h) * Unit::WORDS);
        const ark_u32(&lower)[4] = now[h].piece[0][0];
        const ark_u32(&upper)[4] = now[h].piece[0][1];
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < CODES / 4; i += 2) {
          const uint4 b = *reinterpret_cast<const uint4*>(own + 2 * i);
          const auto a = [&](const ark_u32(&piece)[4], int j) {
            return Reader::plain(piece, 2 * i + j);
          };
          ark_mma(d[0], a(lower, 0), a(upper, 0), a(lower, 1), a(upper, 1), b.x, b.y, type);
          ark_mma(d[1], a(lower, 2), a(upper, 2), a(lower, 3), a(upper, 3), b.z, b.w, type);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int from = lane - own_piece + half * 2 + own_piece / 2;
          const ark_u32 both = __shfl_sync(0xffffffffu, now[h].scale[0][0], from);
          const float scale = Reader::number(own_piece % 2 > 0 ? both >> 16 : both & 0xffffu);
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            all[e] = fmaf(d[0][e] + d[1][e], scale, all[e]);
          }
        }
      }
    }
    // Two columns have the products with both numbers of each element of the input.
    float lower = all[0] + all[1], upper = all[2] + all[3];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      lower += ark_shfl_xor(lower, mask);
      upper += ark_shfl_xor(upper, mask);
    }
    if (works && own_piece == 0) {
      float* to = sums + ((ark_warp() % PARTS * ADDED + slot) * WEIGHTS + tile % WEIGHTS) * CHUNK +
                  tile / WEIGHTS * 16 + own_row;
      to[0] = lower * Codes::PLAIN_BACK;
      to[8] = upper * Codes::PLAIN_BACK;
    }
  }
  last.store(finish, chosen, row, first_slot, begin, count, sums, totals);
}
