// Operands as task bodies see them: an address, and what is known when source is written.

// Elements of type T (ark_u64: packets), S0 to S3 apart in four dimensions; 0 where the operand has
// no such dimension or broadcasts along it. SYSTEM: peers read or write it.
template <typename T>
constexpr bool ark_packets = false;
template <>
inline constexpr bool ark_packets<ark_u64> = true;
template <>
inline constexpr bool ark_packets<const ark_u64> = true;
template <typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
struct ArkOperand {
  static constexpr bool given = true;
  static constexpr int step = static_cast<int>(S3);  // from one element of a row to the next
  static constexpr bool system = SYSTEM;
  static constexpr bool packets = ark_packets<T>;
  T* p;
};

// In place of an operand that a task does without.
struct ArkNoOperand {
  static constexpr bool given = false;
};

// Elements from the operand's first one to the one at four indices.
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

// The element at four indices, waited for where it is a packet.
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

// Two places of one result.
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

// Row i2 of a matrix to shared memory, as ark_load_row does it.
template <bool SCALED, typename T, ark_i64 S0, ark_i64 S1, ark_i64 S2, ark_i64 S3, bool SYSTEM>
ARK_DEVICE float ark_load_row(ArkCtx& c, const ArkOperand<T, S0, S1, S2, S3, SYSTEM>& x, int i2,
                              int n, float* to) {
  return ark_load_row<SCALED>(c, ark_address(x, 0, 0, i2, 0), S3, n, to, SYSTEM);
}
