// The micro-kernels of matrix products: they multiply a panel of rows of the left operand by a
// panel of columns of the right one. The sums of a few rows by two vectors of columns stay in
// registers while the inner dimension k advances by groups. A group is 4 bytes of consecutive k:
// one float, two bf16 or four int8.
//
// Panels are copies of parts of the operands (panels.h). Both are divided into blocks of 16 groups
// of k. In a block of a left panel the 16 groups of a row are contiguous. In a right panel the same
// group of all ARK_PANEL_COLUMNS columns is contiguous. All instruction sets read this layout.

typedef ark_u32 ark_group __attribute__((may_alias));
template <typename S>
struct ArkVectorOf {
  typedef S type __attribute__((vector_size(ARK_VECTOR_BYTES), aligned(4), may_alias));
};
constexpr int ARK_VECTOR = ARK_VECTOR_BYTES / 4, ARK_PANEL_COLUMNS = 2 * ARK_VECTOR;
constexpr int ARK_BLOCK_GROUPS = 16, ARK_BLOCK_BYTES = 4 * ARK_BLOCK_GROUPS;

#if defined(__AVX512F__)
#define ARK_IN_REGISTER "v"
#elif defined(__x86_64__)
#define ARK_IN_REGISTER "x"
#else
#define ARK_IN_REGISTER "w"
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define ARK_BF16_DOT "vdpbf16ps %2, %1, %0"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ARK_BF16_DOT "bfdot %0.4s, %1.8h, %2.8h"
#endif
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define ARK_INT8_DOT "vpdpbusd %2, %1, %0"
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__AVXVNNI__)
#define ARK_INT8_DOT "%{vex%} vpdpbusd %2, %1, %0"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define ARK_INT8_DOT "sdot %0.4s, %1.16b, %2.16b"
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(ARK_BF16_DOT) && \
    defined(ARK_INT8_DOT) && defined(__linux__)
#define ARK_HAS_TILES 1
#endif

// The type of panel elements, chosen by the types of the operands' elements (A and B). It
// represents all values of both types exactly.
template <typename A, typename B>
struct ArkPart {
  typedef float type;
};
#if defined(ARK_INT8_DOT)
template <>
struct ArkPart<const signed char*, const signed char*> {
  typedef signed char type;
};
#elif defined(__AVX2__)
template <>
struct ArkPart<const signed char*, const signed char*> {
  typedef int16_t type;
};
#else
template <>
struct ArkPart<const signed char*, const signed char*> {
  typedef ark_i32 type;
};
#endif
#if defined(ARK_BF16_DOT)
template <>
struct ArkPart<const ark_bf16*, const ark_bf16*> {
  typedef uint16_t type;  // the bits of a bf16
};
#endif

// How panel elements of type P are multiplied, for one instruction set. sum: the type of a sum.
// vector: a vector of panel elements or sums. left(p): loads the group at p (4 bytes of a row) into
// all lanes of a vector. add: multiplies the groups in the lanes of a and b, and adds the products
// to the lanes of `total`. BIASED: true if left() adds 128 to int8 elements (see below).
template <typename P>
struct ArkDot {
  typedef P sum;
  typedef typename ArkVectorOf<P>::type vector;
  static constexpr bool BIASED = false;
  ARK_DEVICE vector left(const P* p) {
    vector all = *p - vector{};
    asm("" : "+" ARK_IN_REGISTER(all));  // keeps the value in a register
    return all;
  }
  ARK_DEVICE void add(vector& total, const vector& a, const vector& b) { total += a * b; }
};
#if defined(__AVX2__)
template <>
struct ArkDot<int16_t> {
  typedef ark_i32 sum;
  typedef ArkVectorOf<ark_u32>::type vector;
  static constexpr bool BIASED = false;
  ARK_DEVICE vector left(const int16_t* p) {
    return *reinterpret_cast<const ark_group*>(p) - vector{};
  }
  ARK_DEVICE void add(vector& total, const vector& a, const vector& b) {
    vector pairs;
    asm("vpmaddwd %2, %1, %0"
        : "=" ARK_IN_REGISTER(pairs)
        : ARK_IN_REGISTER(a), ARK_IN_REGISTER(b));
    total += pairs;
  }
};
#endif
#if defined(ARK_BF16_DOT)
template <>
struct ArkDot<uint16_t> {
  typedef float sum;
  typedef ArkVectorOf<float>::type vector;
  static constexpr bool BIASED = false;
  ARK_DEVICE vector left(const uint16_t* p) {
    return (vector)(*reinterpret_cast<const ark_group*>(p) - ArkVectorOf<ark_u32>::type{});
  }
  ARK_DEVICE void add(vector& total, const vector& a, const vector& b) {
    asm(ARK_BF16_DOT : "+" ARK_IN_REGISTER(total) : ARK_IN_REGISTER(a), ARK_IN_REGISTER(b));
  }
};
#endif
#if defined(ARK_INT8_DOT)
template <>
struct ArkDot<signed char> {
  typedef ark_i32 sum;
  typedef ArkVectorOf<ark_u32>::type vector;
  // The int8 instruction of x86 multiplies unsigned by signed bytes. So (a + 128) b is summed, and
  // the sum of 128 b is subtracted at the end.
#if defined(__x86_64__)
  static constexpr bool BIASED = true;
#else
  static constexpr bool BIASED = false;
#endif
  ARK_DEVICE vector bias() { return 0x80808080u - vector{}; }
  ARK_DEVICE vector left(const signed char* p) {
    const vector all = *reinterpret_cast<const ark_group*>(p) - vector{};
    return BIASED ? all ^ bias() : all;
  }
  ARK_DEVICE void add(vector& total, const vector& a, const vector& b) {
    asm(ARK_INT8_DOT : "+" ARK_IN_REGISTER(total) : ARK_IN_REGISTER(a), ARK_IN_REGISTER(b));
  }
};
#endif

// Multiplies R rows of a left panel, which has PITCH rows, by a right panel, over `groups` groups
// of k. The product is stored to `sums` or, if `begun`, added to it. Rows of `sums` are STRIDE
// elements apart.
template <int R, int PITCH, int STRIDE, typename P, typename S>
ARK_DEVICE void ark_dots(const P* a, const P* b, int groups, S* sums, bool begun) {
  typedef ArkDot<P> dot;
  typedef typename dot::vector vector;
  constexpr int GROUP = 4 / static_cast<int>(sizeof(P));
  vector total[R][2] = {}, excess[2] = {};
  for (int g = 0; g < groups; a += PITCH * ARK_BLOCK_GROUPS * GROUP) {
    const int end = groups - g < ARK_BLOCK_GROUPS ? groups : g + ARK_BLOCK_GROUPS;
    for (const P* from = a; g < end; ++g, from += GROUP, b += ARK_PANEL_COLUMNS * GROUP) {
      const vector low = *reinterpret_cast<const vector*>(b);
      const vector high = *reinterpret_cast<const vector*>(b + ARK_VECTOR * GROUP);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vector left = dot::left(from + r * ARK_BLOCK_GROUPS * GROUP);
        dot::add(total[r][0], left, low);
        dot::add(total[r][1], left, high);
      }
      if constexpr (dot::BIASED) {
        dot::add(excess[0], dot::bias(), low);
        dot::add(excess[1], dot::bias(), high);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    vector* to = reinterpret_cast<vector*>(sums + r * STRIDE);
    const vector low = total[r][0] - excess[0], high = total[r][1] - excess[1];
    to[0] = begun ? to[0] + low : low;
    to[1] = begun ? to[1] + high : high;
  }
}

#if defined(ARK_HAS_TILES)
// AMX: tile registers of 16 rows of 64 bytes. Linux grants their use to a process on request. If it
// does not, ark_dots computes the same sums.
static bool ark_tiles_granted;
__attribute__((constructor)) static void ark_ask_for_tiles() {
  constexpr long ARCH_PRCTL = 158, REQUEST = 0x1023, TILE_DATA = 18;
  long answer = ARCH_PRCTL;
  asm volatile("syscall" : "+a"(answer) : "D"(REQUEST), "S"(TILE_DATA) : "rcx", "r11", "memory");
  ark_tiles_granted = answer == 0;
}
ARK_DEVICE void ark_begin_tiles() {
  struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  asm volatile("ldtilecfg %0" : : "m"(shape));
}
ARK_DEVICE void ark_end_tiles() { asm volatile("tilerelease"); }

#define ARK_TILES(DOT)                                                                     \
  asm volatile(                                                                            \
      "tileloadd (%0,%2,1), %%tmm4\n\t"                                                    \
      "tileloadd (%1,%3,1), %%tmm6\n\t"                                                    \
      "tileloadd 64(%1,%3,1), %%tmm7\n\t" DOT                                              \
      " %%tmm6, %%tmm4, %%tmm0\n\t"                                                        \
      "tileloadd 1024(%0,%2,1), %%tmm5\n\t" DOT " %%tmm7, %%tmm4, %%tmm1\n\t" DOT          \
      " %%tmm6, %%tmm5, %%tmm2\n\t" DOT " %%tmm7, %%tmm5, %%tmm3"                          \
      :                                                                                    \
      : "r"(a), "r"(b), "r"(ark_i64{ARK_BLOCK_BYTES}), "r"(ark_i64{4 * ARK_PANEL_COLUMNS}) \
      : "memory")
// Like ark_dots, for 32 rows at once, by AMX (matrix) instructions.
template <int STRIDE, typename P, typename S>
ARK_DEVICE void ark_tiles(const P* a, const P* b, int groups, S* sums, bool begun) {
  const ark_i64 pitch = STRIDE * 4;
  S* below = sums + 16 * STRIDE;
  if (begun) {
    asm volatile(
        "tileloadd (%0,%2,1), %%tmm0\n\t"
        "tileloadd 64(%0,%2,1), %%tmm1\n\t"
        "tileloadd (%1,%2,1), %%tmm2\n\t"
        "tileloadd 64(%1,%2,1), %%tmm3"
        :
        : "r"(sums), "r"(below), "r"(pitch)
        : "memory");
  } else {
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
  }
  constexpr int BLOCK = ARK_BLOCK_BYTES / static_cast<int>(sizeof(P));
  for (int g = 0; g < groups; g += ARK_BLOCK_GROUPS) {
    if constexpr (sizeof(P) == 2) {
      ARK_TILES("tdpbf16ps");
    } else {
      ARK_TILES("tdpbssd");
    }
    a += 32 * BLOCK;
    b += ARK_PANEL_COLUMNS * BLOCK;
  }
  asm volatile(
      "tilestored %%tmm0, (%0,%2,1)\n\t"
      "tilestored %%tmm1, 64(%0,%2,1)\n\t"
      "tilestored %%tmm2, (%1,%2,1)\n\t"
      "tilestored %%tmm3, 64(%1,%2,1)"
      :
      : "r"(sums), "r"(below), "r"(pitch)
      : "memory");
}
#endif

// The number of rows of a left panel.
template <typename P>
constexpr int ark_panel_rows() {
#if defined(ARK_HAS_TILES)
  if (sizeof(P) < 4) return 32;
#endif
  return ARK_PANEL_ROWS;
}
// Like ark_dots, but for all rows of a left panel instead of R rows.
template <int STRIDE, typename P, typename S>
ARK_DEVICE void ark_multiply_panels(const P* a, const P* b, int groups, S* sums, bool begun) {
  constexpr int ROWS = ark_panel_rows<P>();
#if defined(ARK_HAS_TILES)
  if constexpr (sizeof(P) < 4) {
    if (ark_tiles_granted) {
      ark_tiles<STRIDE>(a, b, groups, sums, begun);
      return;
    }
    constexpr int SOME = 8, GROUP = 4 / static_cast<int>(sizeof(P));
    for (int r = 0; r < ROWS; r += SOME) {
      const P* rows = a + r * ARK_BLOCK_GROUPS * GROUP;
      ark_dots<SOME, ROWS, STRIDE>(rows, b, groups, sums + r * STRIDE, begun);
    }
    return;
  }
#endif
  ark_dots<ROWS, ROWS, STRIDE>(a, b, groups, sums, begun);
}
