// Cache lines to prefetch: those of weights, or a line of other memory if there are no weights.
struct ArkLines {
  const ark_global<char>* first;
  int count;

  ARK_METHOD ark_u32 load(int line) const {
    return *(const ark_global<ark_u32>*)(first + (line < count ? line : count - 1) * 128);
  }
};
