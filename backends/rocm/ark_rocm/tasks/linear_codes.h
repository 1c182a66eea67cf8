// Quantised weights for linear layers of several input rows (linear_several.h). Codes are converted
// to bf16, which represents each code exactly. The scales of the codes multiply the sums.

// The weights of a linear layer, stored as rows of codes. For each product a lane has eight
// neighbouring codes. A product multiplies 32 codes of a row, which have one scale. ROWS, lane: see
// ArkSeveralDense.
template <class ROW, int ROWS>
struct ArkSeveralCodes;
template <class C, int K, int GROUP, class S, bool ZERO, int R>
struct ArkSeveralCodes<ArkRow<C, K, GROUP, S, ZERO>, R> {
  typedef ArkRow<C, K, GROUP, S, ZERO> Row;
  static_assert(GROUP % 32 == 0 || GROUP == K, "a product's elements share a scale");
  static constexpr bool ZEROS = ZERO;
  static constexpr int STEPS = 4, HALF = STEPS * ARK_STEP;  // HALF: elements of a half of a chunk
  static constexpr int SCALES = GROUP % HALF == 0 || GROUP == K ? 1 : STEPS;
  static constexpr int ROW_BYTES = sizeof(Row);
  static constexpr int ROWS = R, BITS = ARK_CODE_BITS<C>, MOST = R == 8 ? 4 : 8, NEXT = 2,
                       EARLY = MOST;
  typedef ark_u32 Load __attribute__((ext_vector_type(BITS / 4)));  // eight codes
  struct Piece {
    Load words[STEPS];
    S scales[SCALES];
    S zeros[ZERO ? SCALES : 1];
  };
  const ark_global<char>* bytes;
  int rows;
  int lane;

  ARK_METHOD int half() const { return ROWS == 8 ? lane / 8 % 2 : 0; }
  ARK_METHOD int place(int s, int half) const { return half * HALF + s * 32 + lane / 16 * 8; }
  ARK_METHOD int place(int s) const { return place(s, half()); }
  static constexpr int order(int e) { return ARK_PAIRS_APART<C> ? e % 4 * 2 + e / 4 : e; }
  // Loads this lane's codes and scales of a chunk. Rows and elements past the end are replaced, as
  // in ArkSeveralDense::load.
  ARK_METHOD Piece load(int top, int chunk) const {
    const int row = top + lane % ROWS < rows ? top + lane % ROWS : rows - 1;
    const ark_u32 begin = static_cast<ark_u32>(row) * static_cast<ark_u32>(sizeof(Row));
    Piece piece;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = ark_chunk_at<K, ArkSeveralCodes>(chunk, place(s));
      const auto* from = bytes + (begin + static_cast<ark_u32>(k / 8 * BITS));
      piece.words[s] = __builtin_nontemporal_load((const ark_global<Load>*)from);
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
      const int at = half() * HALF + i * (HALF / SCALES);
      const int group = ark_chunk_at<K, ArkSeveralCodes>(chunk, at) / GROUP;
      const auto* from = bytes + (begin + static_cast<ark_u32>(group * sizeof(S)));
      piece.scales[i] = *(const ark_global<S>*)(from + Row::SCALES_AT);
      if constexpr (ZERO) piece.zeros[i] = *(const ark_global<S>*)(from + Row::ZEROS_AT);
    }
    return piece;
  }
  ARK_DEVICE ark_u32x4 step(const Piece& piece, int s) {
    ark_u32 words[BITS / 4];
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) words[i] = piece.words[s][i];
    return ark_code_pairs(static_cast<const C*>(nullptr), words);
  }
  ARK_DEVICE float scale(const Piece& piece, int i) {
    return ARK_CODE_UNIT<C> * ark_plain(piece.scales[i]);
  }
  ARK_DEVICE float zero(const Piece& piece, int i) {
    return ark_plain(piece.zeros[i]) / ARK_CODE_UNIT<C>;
  }
};
