// Totals of linear recurrences h[i] = factor[i] * h[i - 1] + term[i].

// The function that a run of consecutive elements of a line applies to the value before the run.
// The value before a line is 0. So for a run that begins the line, `term` is the value of its last
// element.
struct ArkLinear {
  float factor, term;
};

ARK_DEVICE ArkLinear ark_shfl_bits(const ArkLinear& v, int mask) {
  return {ark_shfl_xor(v.factor, mask), ark_shfl_xor(v.term, mask)};
}

ARK_DEVICE ArkLinear ark_join_linear(const ArkLinear& now, const ArkLinear& more) {
  return {more.factor * now.factor, more.factor * now.term + more.term};
}
