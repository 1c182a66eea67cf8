// Tiles of matrix products by tcgen05.mma (sm_100a), in the kernel variant `matrix`: the code that
// the computing warps run. products.h has the code of the loading thread. One lane starts all
// instructions of a tile. The sums are in tensor memory. When they are complete, each warp loads
// its rows to registers, in the register layout of wgmma.

// For each element type, CODE is its number in the instruction descriptor, and KIND the kind of
// instruction: 0 fp16 and bf16, 1 tf32, 2 8-bit floats, 3 integers.
template <typename T>
struct ArkTensorType;
template <>
struct ArkTensorType<ark_f16> {
  static constexpr ark_u32 CODE = 0u, KIND = 0u;
};
template <>
struct ArkTensorType<ark_bf16> {
  static constexpr ark_u32 CODE = 1u, KIND = 0u;
};
template <>
struct ArkTensorType<float> {
  static constexpr ark_u32 CODE = 2u, KIND = 1u;
};
template <>
struct ArkTensorType<ark_e4m3> {
  static constexpr ark_u32 CODE = 0u, KIND = 2u;
};
template <>
struct ArkTensorType<ark_e5m2> {
  static constexpr ark_u32 CODE = 1u, KIND = 2u;
};
template <>
struct ArkTensorType<signed char> {
  static constexpr ark_u32 CODE = 1u, KIND = 3u;
};

template <ark_u32 KIND>
struct ArkTensorSum {
  typedef float type;
  ARK_DEVICE float of(ark_u32 bits) { return __uint_as_float(bits); }
};
template <>
struct ArkTensorSum<3u> {
  typedef ark_i32 type;
  ARK_DEVICE ark_i32 of(ark_u32 bits) { return static_cast<ark_i32>(bits); }
};

// multiply(d, a, b, add): starts one instruction, which multiplies the tile's rows and columns over
// 32 bytes of k. d: the address of the sums in tensor memory. a, b: the lower halves of the
// operands' matrix descriptors; the upper half is common. add: 1 to add the product to the sums, 0
// to overwrite them. HOW: the instruction descriptor.
#define ARK_TENSOR_MULTIPLY(KIND)                                                    \
  asm volatile(                                                                      \
      "{\n .reg .pred p;\n .reg .b64 x, y;\n setp.ne.b32 p, %4, 0;\n mov.b64 x, "    \
      "{%1, " ARK_MATRIX_ROWS "};\n mov.b64 y, {%2, " ARK_MATRIX_ROWS                \
      "};\n tcgen05.mma.cta_group::1.kind::" KIND " [%0], x, y, %3, p;\n}" ::"r"(d), \
      "r"(a), "r"(b), "r"(HOW), "r"(add)                                             \
      : "memory")
template <class P>
struct ArkTensorProduct {
  typedef ArkTensorType<typename P::T> A;
  typedef ArkTensorType<typename P::TB> B;
  static_assert(A::KIND == B::KIND, "an instruction takes both sides");
  typedef ArkTensorSum<A::KIND> Sum;
  static constexpr ark_u32 HOW = (A::KIND == 3u ? 2u : 1u) << 4 | A::CODE << 7 | B::CODE << 10 |
                                 (P::A_ACROSS ? 1u : 0u) << 15 | (P::B_ACROSS ? 1u : 0u) << 16 |
                                 static_cast<ark_u32>(P::ALL) / 8u << 17 |
                                 (P::TALL ? 128u : 64u) / 16u << 24;
  ARK_DEVICE void multiply(ark_u32 d, ark_u32 a, ark_u32 b, ark_u32 add) {
    if constexpr (A::KIND == 0u) {
      ARK_TENSOR_MULTIPLY("f16");
    } else if constexpr (A::KIND == 1u) {
      ARK_TENSOR_MULTIPLY("tf32");
    } else if constexpr (A::KIND == 2u) {
      ARK_TENSOR_MULTIPLY("f8f6f4");
    } else {
      ARK_TENSOR_MULTIPLY("i8");
    }
  }
};

// Called by the first warp: one lane starts all products of a tile. When the products of a stage
// are complete, the hardware signals the stage's barrier `empty`, which releases the stage to the
// loading thread. When all products of the tile are complete, it signals the barrier `made`.
template <class P>
ARK_DEVICE void ark_matrix_start(ArkCtx& c, ark_u32 sums, ark_u32 steps, ArkMatrixSlot& at) {
  const ark_u32 full = ark_shared_address(ark_matrix.full);
  const ark_u32 empty = ark_shared_address(ark_matrix.empty);
  const ark_u32 stages = ark_shared_address(ark_matrix_stage(c, 0u));
  const ark_u32 left = ark_matrix_operand(stages, P::A_LEAD);
  const ark_u32 right = ark_matrix_operand(stages + P::A_BYTES, P::B_LEAD);
  for (ark_u32 k = 0u; k < steps; ++k) {
    ark_matrix_filled(c, full + 8u * at.slot, at.parity);
    __syncwarp();
    ark_sums_fence_after();
    if (ark_one_lane()) {
      const ark_u32 a = left + at.slot * (ARK_MATRIX_STAGE >> 4);
      const ark_u32 b = right + at.slot * (ARK_MATRIX_STAGE >> 4);
#pragma unroll
      for (ark_u32 i = 0u; i < 4u * P::LINES; ++i) {
        ArkTensorProduct<P>::multiply(sums, a + i / 4u * P::A_LINE + i % 4u * P::A_STEP,
                                      b + i / 4u * P::B_LINE + i % 4u * P::B_STEP,
                                      i > 0u || k > 0u ? 1u : 0u);
      }
      ark_products_commit(empty + 8u * at.slot);
      if (k + 1u == steps) ark_products_commit(ark_shared_address(&ark_matrix.made));
    }
    __syncwarp();
    ark_matrix_next(at);
  }
}

// The computing warps' part of a task: computes each tile of the task. steps_of(i1): the number of
// stages of a tile. end(i0, i1, m0, n0, top, left): starts the loads of the epilogue and returns
// the function that stores the sums d of a warp. top: the warp's first row in the tile. left: its
// first column in the result.
//
// Warp w of a warpgroup can access only lanes 32 w to 32 w + 31 of tensor memory. A lane holds a
// row of the tile. A tile of 128 rows uses all lanes; each of the two warpgroups stores 16 of each
// 32 rows. A tile of 64 rows uses the first 16 of every 32 lanes; both warpgroups store these rows,
// each half of the columns.
template <class P, class Steps, class End>
ARK_DEVICE void ark_matrix_product(ArkCtx& c, const ArkTask& t, const Steps& steps_of,
                                   const End& end) {
  typedef typename ArkTensorProduct<P>::Sum Sum;
  const int group = ark_warp() / 4, quarter = ark_warp() % 4;
  const ark_u32 sums = ark_shared_word(&ark_matrix.sums);
  const ark_u32 lane = static_cast<ark_u32>(32 * quarter + (P::TALL ? 16 * group : 0));
  const int top = P::TALL ? 32 * quarter + 16 * group : 16 * quarter;
  const int left = P::TALL ? 0 : group * P::WIDE;
  ArkMatrixSlot at = ark_matrix_place_of();
  ark_u32 parity = ark_matrix_made_parity();
  ark_each_tile<typename P::deal, false>(t, [&](int i0, int i1, int m0, int n0) {
    const auto store = end(i0, i1, m0, n0, top, n0 + left);
    if (ark_warp() == 0) ark_matrix_start<P>(c, sums, steps_of(i1), at);
    while (!ark_matrix_passed(ark_shared_address(&ark_matrix.made), parity)) {
    }
    parity ^= 1u;
    ark_sums_fence_after();
    ark_u32 v[P::WIDE / 16][8];
#pragma unroll
    for (int q = 0; q < P::WIDE / 16; ++q) {
      ark_sums_load(sums + (lane << 16) + static_cast<ark_u32>(left + 16 * q), v[q]);
    }
    ark_sums_loaded();
    typename Sum::type d[P::WIDE / 2];
#pragma unroll
    for (int i = 0; i < P::WIDE / 2; ++i) {
      // This empty instruction keeps the compiler from using the registers before the asynchronous
      // load has filled them.
      asm volatile("" : "+r"(v[i / 8][i % 8]) : : "memory");
      d[i] = Sum::of(v[i / 8][i % 8]);
    }
    ark_sums_fence_before();
    ark_sync();  // after this, products of the next tile may overwrite tensor memory
    store(d);
    return true;
  });
  ark_matrix_keep_place(at, parity);
}
