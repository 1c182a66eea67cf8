// Tiles of matrix products by wgmma (sm_90a), in the kernel variant `matrix`: the code that the
// computing warps run. products.h has the code of the loading thread. The instruction names each
// register of the sums, so wgmma.py generates the macro calls that list them.

// multiply(d, a, b, add): multiplies 64 rows and COLUMNS columns over 32 bytes of k. a, b: the
// lower halves of the operands' matrix descriptors; the upper half is common. add: 1 to add the
// product to d, 0 to overwrite d. ACROSS_A, ACROSS_B: true if k is not the contiguous dimension of
// that operand.
template <int COLUMNS, typename A, typename B, bool ACROSS_A, bool ACROSS_B>
struct ArkWgmma;

// Defines one ArkWgmma. FORM: the suffixes of the instruction's name that give its shape and types.
// SUMS: the references to the asm operands of d, which the arguments after MODIFIERS bind. AT_A,
// AT_B, AT_ADD: the references to the asm operands of a, b and add. MODIFIERS: the instruction's
// sign and transpose operands, for types that have them.
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

// multiply(d, a0, a1, a2, a3, b): like ArkWgmma's multiply, over 16 elements of k, with the operand
// a in the registers a0 to a3 of the warpgroup. The product is always added to d. HELD: the
// assembly operands of a0 to a3.
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

// For tiles of 64 rows: adds the sums of two warpgroups, each over half of the steps along k.
// Warpgroup 0 gets the totals of the left half of the columns in `made`, warpgroup 1 those of the
// right half. The sums are exchanged through shared memory (ark_matrix_slab), at most 16 sums of a
// thread at a time.
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

// The computing warps' part of a task: computes each tile of the task. In tiles of 128 rows
// (P::TALL) a warpgroup multiplies and stores 64 rows. In tiles of 64 rows, one warpgroup
// multiplies the stages in even slots of the ring and the other the stages in odd slots;
// ark_matrix_join then adds their sums, and each warpgroup stores half of the columns.
// steps_of(i1): the number of stages of a tile. end(i0, i1, m0, n0, top, left): starts the loads of
// the epilogue and returns the function that stores the sums d of a warp. top: the warp's first row
// in the tile. left: its first column in the result.
template <class P, class Steps, class End>
ARK_DEVICE void ark_matrix_product(ArkCtx& c, const ArkTask& t, const Steps& steps_of,
                                   const End& end) {
  typedef ArkWgmma<P::ALL, typename P::T, typename P::TB, P::A_ACROSS, P::B_ACROSS> W;
  static_assert(P::TALL || ARK_MATRIX_STAGES % 2u == 0u, "each warpgroup has slots of its own");
  const int group = ark_warp() / 4, first = ark_tid() % 128 == 0;
  ark_u32 full = ark_shared_address(ark_matrix.full);
  ark_u32 empty = ark_shared_address(ark_matrix.empty);
  // This empty instruction makes the compiler keep the addresses in registers. Otherwise it would
  // compute them again in each step.
  asm volatile("" : "+r"(full), "+r"(empty));
  const ark_u32 stages = ark_shared_address(ark_matrix_stage(c, 0u));
  const ark_u32 left = ark_matrix_operand(stages + group * P::A_HALF, P::A_LEAD);
  const ark_u32 right = ark_matrix_operand(stages + P::A_BYTES, P::B_LEAD);
  constexpr ark_u32 STRIDE = P::TALL ? 1u : 2u;  // stages between two stages of a warpgroup
  ArkMatrixSlot at = ark_matrix_place_of();
  ark_each_tile<typename P::deal, false>(t, [&](int i0, int i1, int m0, int n0) {
    // The sums are set to zero although the first product overwrites them. Otherwise the compiler
    // would assume that they are read before they are written, and would keep their registers live
    // in all other bodies of the loop.
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
