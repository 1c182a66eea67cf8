// Operations on both 16-bit values (fp16 or bf16) of a 32-bit word at once.

// Hides from the compiler that v is a constant, so that v stays in a register: v is multiplied by
// the grid's z dimension, which is always 1. An instruction has space for only one immediate
// constant, so the compiler would move further constants to registers before each use.
ARK_DEVICE ark_u32 ark_kept(ark_u32 v) { return v * gridDim.z; }
ARK_DEVICE ark_u32 ark_pair_sum(ark_u32 a, ark_u32 b) {
  ark_u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
ARK_DEVICE ark_u32 ark_pair_fma(ark_u32 a, ark_u32 b, ark_u32 c) {
  ark_u32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
// A fused multiply-add of both 16-bit values of a word. The first argument only selects their type.
ARK_DEVICE ark_u32 ark_both_fma(const ark_f16*, ark_u32 a, ark_u32 b, ark_u32 c) {
  return ark_pair_fma(a, b, c);
}
ARK_DEVICE ark_u32 ark_both_fma(const ark_bf16*, ark_u32 a, ark_u32 b, ark_u32 c) {
  ark_u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
// Converts two fp8 (e4m3), the low half of a word, to fp16.
ARK_DEVICE ark_u32 ark_pair_of_e4m3(ark_u32 word) {
  ark_u32 pair;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %1;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}\n"
      : "=r"(pair)
      : "r"(word));
  return pair;
}
