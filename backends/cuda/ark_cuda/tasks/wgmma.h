// Tiles of matrix products on warpgroups (sm_90a), in the variant `matrix`: the computing half of
// the body. An instruction lists each register of a tile's sums, so Python generates these lists
// (wgmma.py).

// multiply(d, a, b, add): 64 rows, COLUMNS columns, 32 bytes deep. ACROSS_A, ACROSS_B: true if k is
// not the inner dimension of that operand.
template <int COLUMNS, typename A, typename B, bool ACROSS_A, bool ACROSS_B>
struct ArkWgmma;

// FORM: shape and types. SUMS: the registers of d, which are also passed as the last arguments.
// AT_A, AT_B, AT_ADD: the numbers of the registers that follow. MODIFIERS: signs and transposes,
// for types that have them.
#define ARK_WGMMA(COLUMNS, A, B, ACROSS_A, ACROSS_B, SUM, FORM, SUMS, AT_A, AT_B, AT_ADD,        \
                  MODIFIERS, ...)                                                                \
  template <>                                                                                    \
  struct ArkWgmma<COLUMNS, A, B, ACROSS_A, ACROSS_B> {                                           \
    typedef SUM Sum;                                                                             \
    ARK_DEVICE void multiply(Sum (&d)[COLUMNS / 2], ark_u32 a, ark_u32 b, ark_u32 add) {         \
      asm volatile("{\n .reg .pred p;\n .reg .b64 x, y;\n setp.ne.b32 p, " AT_ADD                \
                   ", 0;\n"                                                                      \
                   " mov.b64 x, {" AT_A ", " ARK_MATRIX_ROWS                                     \
                   "};\n"                                                                        \
                   " mov.b64 y, {" AT_B ", " ARK_MATRIX_ROWS                                     \
                   "};\n"                                                                        \
                   " wgmma.mma_async.sync.aligned." FORM " {" SUMS "}, x, y, p" MODIFIERS ";\n}" \
                   : __VA_ARGS__                                                                 \
                   : "r"(a), "r"(b), "r"(add));                                                  \
    }                                                                                            \
  };

// multiply(d, a0, a1, a2, a3, b): multiplies 64 rows of a, 16 deep, from the warpgroup's registers;
// adds to d.
template <int COLUMNS, typename T>
struct ArkWgmmaHeld;
#define ARK_WGMMA_HELD(COLUMNS, T, FORM, SUMS, HELD, AT_B, ...)                           \
  template <>                                                                             \
  struct ArkWgmmaHeld<COLUMNS, T> {                                                       \
    ARK_DEVICE void multiply(float (&d)[COLUMNS / 2], ark_u32 a0, ark_u32 a1, ark_u32 a2, \
                             ark_u32 a3, ark_u32 b) {                                     \
      asm volatile("{\n .reg .b64 y;\n mov.b64 y, {" AT_B ", " ARK_MATRIX_ROWS            \
                   "};\n"                                                                 \
                   " wgmma.mma_async.sync.aligned." FORM " {" SUMS "}, {" HELD            \
                   "}, y, 1, 1, 1, 1;\n}"                                                 \
                   : __VA_ARGS__                                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));                         \
    }                                                                                     \
  };

template <int PENDING>
ARK_DEVICE void ark_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

ARK_DEVICE void ark_wgmma_keep(float& sum) { asm volatile("" : "+f"(sum) : : "memory"); }
ARK_DEVICE void ark_wgmma_keep(ark_i32& sum) { asm volatile("" : "+r"(sum) : : "memory"); }

// Adds up both warpgroups' sums. Each warpgroup gets the totals of the columns that it stores. The
// sums are exchanged through the slabs, 16 sums of a thread at a time.
template <class P, typename S>
ARK_DEVICE void ark_matrix_join(ArkCtx& c, int group, const S (&d)[P::ALL / 2],
                                S (&made)[P::WIDE / 2]) {
  constexpr int HALF = P::WIDE / 2, SOME = HALF % 16 == 0 ? 16 : 8;
  static_assert(2 * 128 * SOME * sizeof(S) <= 8 * ARK_MATRIX_SLAB, "sums fit the slabs");
  S* room = reinterpret_cast<S*>(ark_matrix_slab(c, 0)) + ark_tid() % 128;
#pragma unroll
  for (int q = 0; q < HALF; q += SOME) {
    ark_sync();
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      room[(group * SOME + i) * 128] = group == 0 ? d[HALF + q + i] : d[q + i];
    }
    ark_sync();
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
      const S own = group == 0 ? d[q + i] : d[HALF + q + i];
      made[q + i] = own + room[((1 - group) * SOME + i) * 128];
    }
  }
  ark_sync();
}

// The computing half. Of tiles of 64 rows a warpgroup has every other stage of k, the ring's even
// slots or the odd ones, and stores its columns when both have added up theirs. steps(i1): stages
// that a tile takes. end(i0, i1, m0, n0, top, left) asks for what the tile's end reads, and has
// what stores a warp's sums d, whose first row of the tile is `top` and first column `left`.
template <class P, class Steps, class End>
ARK_DEVICE void ark_matrix_product(ArkCtx& c, const ArkTask& t, const Steps& steps_of,
                                   const End& end) {
  typedef ArkWgmma<P::ALL, typename P::T, typename P::TB, P::A_ACROSS, P::B_ACROSS> W;
  static_assert(P::TALL || ARK_MATRIX_STAGES % 2u == 0u, "each warpgroup has slots of its own");
  const int group = ark_warp() / 4, first = ark_tid() % 128 == 0;
  ark_u32 full = ark_shared_address(ark_matrix.full);
  ark_u32 empty = ark_shared_address(ark_matrix.empty);
  asm volatile("" : "+r"(full), "+r"(empty));  // kept in registers: not found again at each step
  const ark_u32 stages = ark_shared_address(ark_matrix_stage(c, 0u));
  const ark_u32 left = ark_matrix_operand(stages + group * P::A_HALF, P::A_LEAD);
  const ark_u32 right = ark_matrix_operand(stages + P::A_BYTES, P::B_LEAD);
  constexpr ark_u32 STRIDE = P::TALL ? 1u : 2u;  // from a warpgroup's stage to its next one
  ArkMatrixSlot at = ark_matrix_place_of();
  ark_each_tile<typename P::deal, false>(t, [&](int i0, int i1, int m0, int n0) {
    // The sums are cleared although the first product overwrites them. Registers that are read
    // before they are written would stay live in all other bodies of the loop.
    typename W::Sum d[P::ALL / 2] = {};
    const ark_u32 steps = steps_of(i1);
    const int top = 16 * (ark_warp() % (P::TALL ? 8 : 4));
    const auto store = end(i0, i1, m0, n0, top, n0 + (P::TALL ? 0 : group * P::WIDE));
    ark_u32 before = 0u, some = 0u;
    ark_u32 k = P::TALL || (at.slot & 1u) == static_cast<ark_u32>(group) ? 0u : 1u;
    if (k > 0u) ark_matrix_next(at);
    for (; k < steps; k += STRIDE, some = 1u) {
      ark_matrix_filled(c, full + 8u * at.slot, at.parity);
      const ark_u32 a = left + at.slot * (ARK_MATRIX_STAGE >> 4);
      const ark_u32 b = right + at.slot * (ARK_MATRIX_STAGE >> 4);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (ark_u32 i = 0u; i < 4u * P::LINES; ++i) {
        W::multiply(d, a + i / 4u * P::A_LINE + i % 4u * P::A_STEP,
                    b + i / 4u * P::B_LINE + i % 4u * P::B_STEP, i > 0u ? 1u : some);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (P::OVERLAP) {
        if (some > 0u) {
          ark_wgmma_wait<1>();
          if (first) ark_matrix_release<STRIDE>(before);
        }
        before = empty + 8u * at.slot;
      } else {
        ark_wgmma_wait<0>();
        if (first) ark_matrix_release<STRIDE>(empty + 8u * at.slot);
      }
      ark_matrix_next(at);
      if (!P::TALL) ark_matrix_next(at);
    }
    if (P::OVERLAP) {
      ark_wgmma_wait<0>();
      if (first && some > 0u) ark_matrix_release<STRIDE>(before);
    }
#pragma unroll
    for (int i = 0; i < P::ALL / 2; ++i) ark_wgmma_keep(d[i]);
    if constexpr (P::TALL) {
      store(d);
    } else {
      if (k > steps) ark_matrix_back(at);
      typename W::Sum made[P::WIDE / 2];
      ark_matrix_join<P>(c, group, d, made);
      store(made);
    }
    return true;
  });
  ark_matrix_keep_place(at);
}
