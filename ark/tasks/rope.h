// Rotary position embedding with given factors: products of complex numbers. rope.py describes
// operands and tasks.

// Multiplies complex numbers that are stored as pairs of elements. A task computes a tile of T0 x
// T1 x T2 x T3 elements of a result of N0 x N1 x N2 x N3. a, b and output give the address of the
// first element of a pair; the second element is SA, SB or SO elements after it.
template <int T0, int T1, int T2, int T3, int N0, int N1, int N2, int N3, ark_i64 SA, ark_i64 SB,
          ark_i64 SO, class A, class B, class O>
ARK_DEVICE void ark_rope_multiply(ArkCtx&, const ArkTask& t, const A& a, const B& b,
                                  const O& output) {
  const int n0 = t.coord[0] + T0 < N0 ? T0 : N0 - t.coord[0];
  const int n1 = t.coord[1] + T1 < N1 ? T1 : N1 - t.coord[1];
  const int n2 = t.coord[2] + T2 < N2 ? T2 : N2 - t.coord[2];
  const int n3 = (t.coord[3] + T3 < N3 ? T3 : N3 - t.coord[3]) / 2;
  for (int e = ark_tid(); e < n0 * n1 * n2 * n3; e += ARK_THREADS) {
    int r = e;
    const int j = t.coord[3] + r % n3 * 2;
    r /= n3;
    const int i2 = t.coord[2] + r % n2;
    r /= n2;
    const int i1 = t.coord[1] + r % n1, i0 = t.coord[0] + r / n1;
    const auto* left = a(i0, i1, i2, j);
    const auto* right = b(i0, i1, i2, j);
    const float ar = ark_get(left, 0), ai = ark_get(left, SA);
    const float br = ark_get(right, 0), bi = ark_get(right, SB);
    auto* to = output(i0, i1, i2, j);
    ark_put(to, 0, ar * br - ai * bi);
    ark_put(to, SO, ar * bi + ai * br);
  }
}
