// Operands as task bodies see them: an address, with a type and strides that are compile-time
// constants of the generated source.

// True if operands of element type T hold packets.
template <typename T>
constexpr bool ark_packets = false;
template <>
inline constexpr bool ark_packets<ark_u64> = true;
template <>
inline constexpr bool ark_packets<const ark_u64> = true;
// An operand with elements of type T (ark_u64: packets). S0 to S3 are the strides of its four
// dimensions, in elements; a stride is 0 if the operand has no such dimension or is broadcast along
// it. SYSTEM: true if peers read or write the operand.
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkOperand {
  static constexpr bool given = true;
  // The distance between neighbouring elements of a row, in elements.
  static constexpr int step = static_cast<int>(S3);
  static constexpr bool system = SYSTEM;
  static constexpr bool packets = ark_packets<T>;
  T* p;
};

// The type of an optional operand that the op does not have.
struct ArkNoOperand {
  static constexpr bool given = false;
};

// The offset, in elements, of the element at four indices from the operand's first element.
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE ark_i64 ark_at(const ArkOperand<T, S0, S1, S2, S3, SYSTEM>&, int i0, int i1, int i2,
                          int i3) {
  return static_cast<ark_i64>(i0) * S0 + static_cast<ark_i64>(i1) * S1 +
         static_cast<ark_i64>(i2) * S2 + static_cast<ark_i64>(i3) * S3;
}

template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE T* ark_address(const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, int i0, int i1, int i2,
                          int i3) {
  return x.p + ark_at(x, i0, i1, i2, i3);
}

// Loads the element at four indices as a float. If it is a packet, waits for it.
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, int i0, int i1,
                          int i2, int i3) {
  return ark_load(c, x.p, ark_at(x, i0, i1, i2, i3), SYSTEM);
}

template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE void ark_publish(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, int i0,
                            int i1, int i2, int i3, float v) {
  ark_publish(c, x.p, ark_at(x, i0, i1, i2, i3), v, SYSTEM);
}

// Two output operands, to each of which the same result is stored.
template <class A, class B>
struct ArkBoth {
  A first;
  B second;
};
template <class A, class B>
ARK_DEVICE ArkBoth<A, B> ark_both(A first, B second) {
  return {first, second};
}
template <class A, class B>
ARK_DEVICE void ark_publish(ArkCtx& c, const ArkBoth<A, B>& x, int i0, int i1, int i2, int i3,
                            float v) {
  ark_publish(c, x.first, i0, i1, i2, i3, v);
  ark_publish(c, x.second, i0, i1, i2, i3, v);
}

// Loads row i2 of a matrix into shared memory, as ark_load_row does.
template <bool SCALED, typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE float ark_load_row(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, int i2,
                              int n, float* to) {
  return ark_load_row<SCALED>(c, ark_address(x, 0, 0, i2, 0), S3, n, to, SYSTEM);
}
