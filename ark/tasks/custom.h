// The indices of one axis that a task of a custom op processes: from begin to end (exclusive), at
// most `tile` of the axis's `size` indices.
template <int TILE, int SIZE>
struct ArkAxis {
  static constexpr int tile = TILE;
  static constexpr int size = SIZE;
  int begin;
  int end;
};
template <int TILE, int SIZE>
ARK_DEVICE ArkAxis<TILE, SIZE> ark_axis(int begin) {
  return {begin, SIZE - begin < TILE ? SIZE : begin + TILE};
}

// The address of an element of an operand that has fewer than four dimensions. i: one index for
// each dimension of the operand.
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM, class... I>
ARK_DEVICE T* ark_address(const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, I... i) {
  static_assert(sizeof...(I) >= 1 && sizeof...(I) <= 4, "an operand has one to four indices");
  if constexpr (sizeof...(I) == 4) {
    return x.p + ark_at(x, i...);
  } else {
    return ark_address(x, 0, i...);
  }
}
// Overloads of ark_load and ark_store for operands of a custom op. Elements of any type are loaded
// as floats. If an operand is in packets, ark_load waits until the packet has arrived, and
// ark_store sends one.
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM, class... I>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, I... i) {
  return ark_load(c, ark_address(x, i...), 0, SYSTEM);
}
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM, class... I>
ARK_DEVICE void ark_store(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& y, float v,
                          I... i) {
  ark_publish(c, ark_address(y, i...), 0, v, SYSTEM);
}
