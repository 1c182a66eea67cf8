// Attention of tiles of queries on matrix units (FlashAttention-2, Dao 2023): the operands and
// products of a wave. attention_walk.h has the loop over blocks of keys. A wave computes a slab of
// queries, one per column of the matrix unit's block: 32 with MFMA and 16 with WMMA. It computes
// the transposed products, keys times queries and values times exponentials. So all scores and sums
// of a lane belong to one query: the lane has column lane % ARK_UNIT of a block, in the rows that
// ark_unit_row gives. The scores become exponentials, which are an operand of the second product.
// In the transposed layout, the lane that needs an exponential has the same column as the lane that
// computed its score, so that no exchange through shared memory is needed.

#if defined(__GFX9__)
constexpr int ARK_UNIT = ARK_LARGE;  // rows and columns of a block
typedef ark_large_sums ark_unit_sums;
typedef ark_u16x8 ark_unit_part;  // a lane's part of a block's 16 elements along k
// The row order of the left operand. ark_unit_order(lane): the row of the operand that a lane
// holds. ark_unit_slot(row): the inverse, the lane that holds a row.
ARK_DEVICE constexpr int ark_unit_order(int lane) { return lane; }
ARK_DEVICE constexpr int ark_unit_slot(int row) { return row; }
// These functions load a lane's operand of the matrix unit. With MFMA an operand is one piece of 8
// elements along k; with WMMA it is two pieces, of which the second one is `apart` bytes after the
// first.
ARK_DEVICE int ark_unit_piece() { return ark_lane() / ARK_UNIT; }
ARK_DEVICE ark_unit_part ark_unit_joined(ark_u32x4 first, ark_u32x4) {
  return __builtin_bit_cast(ark_unit_part, first);
}
ARK_DEVICE ark_unit_part ark_unit_read(const ark_local* at, int) {
  return *(const ark_in_local<ark_unit_part>*)at;
}
template <typename T>
ARK_DEVICE ark_unit_sums ark_unit_multiply(const T* type, ark_unit_part a, ark_unit_part b,
                                           ark_unit_sums sums) {
#pragma unroll
  for (int part = 0; part < ARK_LARGE_PARTS; ++part) {
    sums = ark_large_multiply(type, a, b, sums, part);
  }
  return sums;
}
#else
constexpr int ARK_UNIT = 16;
typedef ark_block ark_unit_sums;
typedef ark_part ark_unit_part;
ARK_DEVICE constexpr int ark_unit_order(int lane) {
  return lane / 8 * 8 + lane % 2 * 4 + lane / 2 % 4;
}
ARK_DEVICE constexpr int ark_unit_slot(int row) { return row / 8 * 8 + row % 4 * 2 + row / 4 % 2; }
ARK_DEVICE int ark_unit_piece() { return 0; }
ARK_DEVICE ark_unit_part ark_unit_joined(ark_u32x4 first, ark_u32x4 second) {
  struct {
    ark_u32x4 piece[2];
  } both = {{first, second}};
  return __builtin_bit_cast(ark_unit_part, both);
}
ARK_DEVICE ark_unit_part ark_unit_read(const ark_local* at, int apart) {
  return ark_unit_joined(*(const ark_in_local<ark_u32x4>*)at,
                         *(const ark_in_local<ark_u32x4>*)(at + apart));
}
template <typename T>
ARK_DEVICE ark_unit_sums ark_unit_multiply(const T* type, ark_unit_part a, ark_unit_part b,
                                           ark_unit_sums sums) {
  return ark_multiply(type, a, b, sums);
}
#endif

constexpr int ARK_UNIT_ELEMENTS = ARK_UNIT * ARK_UNIT / ARK_LANES;
constexpr float ARK_ATTENTION_LOG2E = 1.44269504f;
// A row's running maximum is raised only when a score exceeds it by more than this (in powers of
// two). Sums of exponentials of up to 2^8 lose no precision, and sums are seldom rescaled.
constexpr float ARK_ATTENTION_SLACK = 8.0f;

typedef ark_u32 ark_u32x2 __attribute__((ext_vector_type(2)));

// In a block of the matrix unit, element e of a lane belongs to row ark_unit_row(e) +
// ark_unit_first().
ARK_DEVICE constexpr int ark_unit_row(int e) { return e / 4 * 8 + e % 4; }
ARK_DEVICE int ark_unit_first() { return ark_lane() / ARK_UNIT * 4; }
// 2^v, with an error of a few units in the last place.
ARK_DEVICE float ark_attention_power(float v) { return __builtin_amdgcn_exp2f(v); }

// Converts two exponentials (fp32) to two fp16 or bf16 elements in one word. The conversion of a
// vector becomes one instruction on gfx950; conversions of single numbers would need three. Without
// an instruction for bf16, a value halfway between two bf16 numbers is rounded up.
template <typename TO>
ARK_DEVICE ark_u32 ark_attention_converted(float a, float b) {
  typedef float pair __attribute__((ext_vector_type(2)));
  typedef TO halves __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(ark_u32, __builtin_convertvector(pair{a, b}, halves));
}
ARK_DEVICE ark_u32 ark_attention_pair(const ark_f16*, float a, float b) {
  return ark_attention_converted<_Float16>(a, b);
}
ARK_DEVICE ark_u32 ark_attention_pair(const ark_bf16*, float a, float b) {
#if defined(__gfx950__)
  return ark_attention_converted<__bf16>(a, b);
#else
  return __builtin_amdgcn_perm(ark_float_bits(b) + 0x8000u, ark_float_bits(a) + 0x8000u,
                               0x07060302u);
#endif
}
// Stores four results to memory.
template <typename T>
ARK_DEVICE void ark_attention_store(T* to, float a, float b, float c, float d) {
  if constexpr (sizeof(T) == 4) {
    *(ark_global<ark_f32x4>*)to = ark_f32x4{a, b, c, d};
  } else {
    struct {
      T of[4];
    } four;
    ark_put(four.of, 0, a), ark_put(four.of, 1, b), ark_put(four.of, 2, c), ark_put(four.of, 3, d);
    *(ark_global<ark_u32x2>*)to = __builtin_bit_cast(ark_u32x2, four);
  }
}

// How the waves of a block compute a tile. There are SLABS times GROUPS waves. Shared memory holds
// BUFFERS blocks, each with KEYS keys for each group. HELD: true if queries stay in registers;
// otherwise they are read again from memory. AHEAD: true if the next block's scores are computed
// while this block's scores are converted to exponentials. An fp32 query is split into three bf16
// parts, whose sum is the query. The exponentials of its scores are split in the same way.
//
// In shared memory, keys are stored as pieces of 8 elements. Piece p of the key in slot s is at
// index p * PITCH + s. So lanes have no bank conflicts when they write the pieces of a key or read
// neighbouring keys.
//
// Values are stored transposed, as pieces of 8 keys. The order of the keys is that of a lane's
// scores: piece 2 g + h has the four keys from 16 g + 4 h on and the four keys from 16 g + 8 + 4 h
// on. Element d of piece p is at index p * WIDE + d % 4 * APART + d / 4. So lanes have no bank
// conflicts when they write four elements of four keys each or read neighbouring elements.
template <typename ELEMENT, typename QUERY, int WIDTH_, int SLABS_, int GROUPS_, int KEYS_,
          bool HELD_, bool AHEAD_, int BUFFERS_>
struct ArkAttentionUnits {
  typedef ELEMENT T;
  typedef QUERY Q;
  static constexpr int PARTS = ArkElements<Q>::PARTS;
  static constexpr int WIDTH = WIDTH_, SLABS = SLABS_, GROUPS = GROUPS_, KEYS = KEYS_;
  static constexpr bool HELD = HELD_, AHEAD = AHEAD_;
  static constexpr int BUFFERS = BUFFERS_;
  // True if the vector instructions of a block are spread over its products. With WMMA this would
  // gain nothing, because products are executed by the vector unit. An fp32 query's parts need too
  // many registers.
  static constexpr bool SPREAD = AHEAD && ARK_LANES == 64 && PARTS == 1;
  static constexpr int STEPS = (WIDTH + 15) / 16, PIECES = 2 * STEPS;
  static constexpr int BLOCKS = (WIDTH + ARK_UNIT - 1) / ARK_UNIT;  // of sums
  static constexpr int OWN = KEYS / ARK_UNIT;                       // blocks of scores
  static constexpr int ALL = GROUPS * KEYS, PITCH = ALL + 1;
  static constexpr int APART = WIDTH / 4 + (42 - WIDTH / 4 % 8) % 8, WIDE = 4 * APART;
  static constexpr int VALUES = PIECES * PITCH * 16;  // where they begin, in bytes
  static constexpr int BYTES = VALUES + ALL / 8 * WIDE * 16;
  static constexpr int TASKS = SLABS * GROUPS;
  // True if addresses that depend on the thread's number are kept in registers. If false, each
  // round of the loop computes them again, to save registers.
  static constexpr bool KEPT = WIDTH == 64 || (WIDTH == 128 && PARTS == 1);
  // The number of operands that are read from shared memory in one batch, while the previous batch
  // is multiplied.
  static constexpr int FEW = ARK_LANES == 64 ? (SPREAD || PARTS > 1 ? 2 : 4) : WIDTH > 192 ? 1 : 2;
  static_assert(TASKS <= ARK_WARPS && KEYS % 32 == 0 && WIDTH % 8 == 0, "as layout_of has it");

  ARK_DEVICE int slab() { return ark_warp() % SLABS; }
  ARK_DEVICE int group() { return ark_warp() / SLABS; }
  ARK_DEVICE constexpr int slot(int d) { return d % 4 * APART + d / 4; }
};

// A number that is a type, so that code can depend on it with `if constexpr`.
template <int N>
struct ArkNumber {
  static constexpr int value = N;
};
// Calls f(ArkNumber<N>()) for the numbers from BEGIN to END - 1. The compiler would not unroll a
// loop if its body is as large as the loop over blocks of keys.
template <int BEGIN, int END, class F>
ARK_DEVICE void ark_attention_each_number(const F& f) {
  if constexpr (BEGIN < END) {
    f(ArkNumber<BEGIN>());
    ark_attention_each_number<BEGIN + 1, END>(f);
  }
}

// Interleaves reads of operands from shared memory with products: FEW operands are read while the
// previous FEW are multiplied. work.COUNT: their number; work.read(i) reads an operand,
// work.multiply(i, operand) multiplies it. beside(ArkNumber<i>()): instructions that are executed
// after product i, while the matrix unit is busy with it. The compiler may move scalar instructions
// across these parts, and also global loads if work.LOADS is true. If FREE is true, it may also
// move vector instructions, and `beside` is not called.
template <int FEW, bool FREE, class Work, class Beside>
ARK_DEVICE void ark_attention_each_part(const Work& work, const Beside& beside) {
  constexpr int PASSING = 0x4 | (Work::LOADS ? 0x20 : 0) | (FREE ? 0x402 : 0);
  constexpr int COUNT = Work::COUNT;
  ark_unit_part parts[2][FEW];
  const auto read = [&](int first) __attribute__((always_inline)) {
#pragma unroll
    for (int i = first; i < first + FEW && i < COUNT; ++i) {
      parts[i / FEW % 2][i % FEW] = work.read(i);
    }
    __builtin_amdgcn_sched_barrier(PASSING);
  };
  const auto multiply = [&](int i) __attribute__((always_inline)) {
    if (i % FEW == 0) read(i + FEW);
    work.multiply(i, parts[i / FEW % 2][i % FEW]);
  };
  read(0);
  if constexpr (FREE) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) multiply(i);
  } else {
    ark_attention_each_number<0, COUNT>([&](auto number) __attribute__((always_inline)) {
      multiply(decltype(number)::value);
      __builtin_amdgcn_sched_barrier(PASSING);
      beside(number);
      __builtin_amdgcn_sched_barrier(PASSING);
    });
  }
}

// This lane's part of an operand of the matrix unit. The operand is 16 elements of the lane's
// query, or the exponentials of 16 keys.
template <class U>
struct ArkAttentionParts {
  ark_unit_part part[U::PARTS];
};

// A lane's results so far for its query: the weighted sums of values, by element of the head; the
// maximum to which exponentials are relative (about the largest score so far, times log2(e)); and
// this lane's part of the sum of exponentials.
template <class U>
struct ArkAttentionSums {
  ark_unit_sums block[U::BLOCKS];
  float top, weight;
};
template <class U>
ARK_DEVICE void ark_attention_scale(ArkAttentionSums<U>& sums, float by) {
#pragma unroll
  for (int j = 0; j < U::BLOCKS; ++j) sums.block[j] *= by;
}

// Loads the lane's part of its query for step k of the product of keys and queries. `row` is the
// address of the query in memory.
template <class U>
ARK_DEVICE ArkAttentionParts<U> ark_attention_query(const typename U::Q* row, int k) {
  typedef typename ArkElements<typename U::Q>::piece whole;
  struct Piece {
    ark_u16x8 part[U::PARTS];
  };
  const auto piece = [&](int p) {
    Piece made;
    const bool there = U::WIDTH % 16 == 0 || 8 * p < U::WIDTH;
    ark_split(there ? *(const ark_global<whole>*)(row + 8 * p) : whole(0), made.part);
    return made;
  };
  const Piece first = piece(2 * k + ark_unit_piece());
#if defined(__GFX9__)
  const Piece second = first;
#else
  const Piece second = piece(2 * k + 1);
#endif
  ArkAttentionParts<U> made;
#pragma unroll
  for (int i = 0; i < U::PARTS; ++i) {
    made.part[i] = ark_unit_joined(__builtin_bit_cast(ark_u32x4, first.part[i]),
                                   __builtin_bit_cast(ark_u32x4, second.part[i]));
  }
  return made;
}

template <class U>
ARK_DEVICE ark_unit_sums ark_attention_multiply(ark_unit_part left,
                                                const ArkAttentionParts<U>& right,
                                                ark_unit_sums sums) {
#pragma unroll
  for (int i = 0; i < U::PARTS; ++i) {
    sums = ark_unit_multiply(static_cast<const typename U::T*>(nullptr), left, right.part[i], sums);
  }
  return sums;
}

// The products of keys and queries, which are the scores of the keys of this wave's group. own:
// this lane's offset among the keys in shared memory. query(k): the query's elements for step k.
template <class U, class Q>
struct ArkAttentionScores {
  static constexpr int COUNT = U::STEPS * U::OWN;
  static constexpr bool LOADS = U::HELD;
  ark_unit_sums (&s)[U::OWN];
  const ark_local* own;
  const Q& query;

  ARK_METHOD ark_unit_part read(int i) const {
    const int at = (i / U::OWN * 2 * U::PITCH + i % U::OWN * ARK_UNIT) * 16;
    return ark_unit_read(own + at, U::PITCH * 16);
  }
  ARK_METHOD void multiply(int i, ark_unit_part left) const {
    ark_unit_sums& sum = s[i % U::OWN];
    if (i < U::OWN) sum = 0.0f;
    sum = ark_attention_multiply<U>(left, query(i / U::OWN), sum);
  }
};

// The largest of this lane's scores number `begin` to `end` - 1 and of m.
template <class U>
ARK_DEVICE float ark_attention_most(const ark_unit_sums (&s)[U::OWN], float m, int begin, int end) {
#pragma unroll
  for (int i = begin; i < end; ++i) {
    m = __builtin_fmaxf(m, s[i / ARK_UNIT_ELEMENTS][i % ARK_UNIT_ELEMENTS]);
  }
  return m;
}

// Raises the running maximum if the largest score of the query, m, times `factor` (log2(e) and the
// scale) exceeds it by more than ARK_ATTENTION_SLACK. Smaller increases are ignored, so that sums
// need no rescaling. Returns the factor by which earlier sums must be multiplied.
template <class U>
ARK_DEVICE float ark_attention_raise(float m, ArkAttentionSums<U>& sums, float factor) {
  m *= factor;
  m = m > sums.top + ARK_ATTENTION_SLACK ? m : sums.top;
  const float keep = ark_attention_power(sums.top - m);
  sums.top = m;
  sums.weight *= keep;
  return keep;
}

// Returns a lane's operand of exponentials. The lane has computed one piece of 8 exponentials,
// `own`, which is the whole operand with MFMA. WMMA needs a second piece, which comes from the lane
// with the same query and the other keys.
ARK_DEVICE ark_unit_part ark_attention_shared(ark_u32x4 own) {
#if defined(__GFX9__)
  return ark_unit_joined(own, own);
#else
  ark_u32x4 others;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    others[i] = __builtin_amdgcn_permlanex16(own[i], own[i], 0x76543210u, 0xfedcba98u, true, false);
  }
  const bool second = ark_lane() >= ARK_UNIT;
  return ark_unit_joined(second ? others : own, second ? own : others);
#endif
}

// The exponentials of a block's scores. They are computed in pairs, so that a few of them fit
// between two products.
template <class U>
struct ArkAttentionPowers {
  static constexpr int PAIRS = U::KEYS / 4;
  typedef float pair __attribute__((ext_vector_type(2)));
  ArkAttentionParts<U> operand[U::KEYS / 16];  // of the product with the values
  ark_f32x8 powers;                            // of the operand that is under way
  ark_u32x4 words;                             // the same in 16 bits, if there is one part
  pair sum;                                    // of exponentials

  // Computes pair `number`, relative to the running maximum `top`. PINNED: true if the compiler
  // must not move it elsewhere. Then `sum` is of the block, otherwise of the operand.
  template <bool PINNED>
  ARK_METHOD void add(const ark_unit_sums (&s)[U::OWN], float top, float factor, int number) {
    const int at = 2 * number, i = number % 4;
    const ark_unit_sums& from = s[at / ARK_UNIT_ELEMENTS];
    const pair scores = {from[at % ARK_UNIT_ELEMENTS], from[at % ARK_UNIT_ELEMENTS + 1]};
    const pair raised = __builtin_elementwise_fma(scores, pair(factor), pair(-top));
    const pair v = {ark_attention_power(raised[0]), ark_attention_power(raised[1])};
    sum = (PINNED ? number : i) == 0 ? v : sum + v;
    if constexpr (U::PARTS == 1) {
      const typename U::T* type = nullptr;
      ark_u32 word = ark_attention_pair(type, v[0], v[1]);
      if (PINNED) asm volatile("" : "+v"(word), "+v"(sum));
      words[i] = word;
      if (i == 3) operand[number / 4].part[0] = ark_attention_shared(words);
    } else {
      powers[2 * i] = v[0], powers[2 * i + 1] = v[1];
      if (i < 3) return;
      ark_u16x8 own[U::PARTS];
      ark_split(powers, own);
#pragma unroll
      for (int part = 0; part < U::PARTS; ++part) {
        operand[number / 4].part[part] =
            ark_attention_shared(__builtin_bit_cast(ark_u32x4, own[part]));
      }
    }
  }
};

// The products of values and exponentials, p, which are added to the sums. own: this lane's offset
// among the values in shared memory. last: the offset for the last block of the head's elements,
// which may have fewer elements.
template <class U>
struct ArkAttentionAdded {
  static constexpr int COUNT = U::KEYS / 16 * U::BLOCKS;
  static constexpr bool LOADS = true;
  ArkAttentionSums<U>& sums;
  const ArkAttentionParts<U> (&p)[U::KEYS / 16];
  const ark_local *own, *last;

  ARK_METHOD ark_unit_part read(int i) const {
    const int k = i / U::BLOCKS, j = i % U::BLOCKS;
    const bool part = U::WIDTH % ARK_UNIT != 0 && j == U::BLOCKS - 1;
    const ark_local* from = part ? last : own + j * (ARK_UNIT / 4) * 16;
    return ark_unit_read(from + 2 * k * U::WIDE * 16, U::WIDE * 16);
  }
  ARK_METHOD void multiply(int i, ark_unit_part left) const {
    ark_unit_sums& sum = sums.block[i % U::BLOCKS];
    sum = ark_attention_multiply<U>(left, p[i / U::BLOCKS], sum);
  }
};

// First all products of A, then those of B.
template <class A, class B>
struct ArkAttentionBoth {
  static constexpr int COUNT = A::COUNT + B::COUNT;
  static constexpr bool LOADS = A::LOADS && B::LOADS;
  const A& a;
  const B& b;

  ARK_METHOD ark_unit_part read(int i) const {
    return i < A::COUNT ? a.read(i) : b.read(i - A::COUNT);
  }
  ARK_METHOD void multiply(int i, ark_unit_part left) const {
    if (i < A::COUNT) {
      a.multiply(i, left);
    } else {
      b.multiply(i - A::COUNT, left);
    }
  }
};
