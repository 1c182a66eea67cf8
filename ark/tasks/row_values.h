// Converts rows of a quantised matrix to 16-bit numbers. row_values.py describes operands and
// tasks.

// Dequantises the rows of a task. Task coordinates: first row, and last row + 1. A warp processes a
// row; a lane computes eight of its values at a time.
template <class ROW, ark_i64 PITCH, typename T>
ARK_DEVICE void ark_row_values(ArkCtx&, const ArkTask& t, const unsigned char* bytes, T* values) {
  const ROW* rows = reinterpret_cast<const ROW*>(bytes);
  for (int n = t.coord[0] + ark_warp(); n < t.coord[1]; n += ARK_WARPS) {
    T* to = values + n * PITCH;
    for (int k = ark_lane() * ARK_CODES; k < ROW::COLUMNS; k += ARK_LANES * ARK_CODES) {
      float v[ARK_CODES];
      ark_eight_values(rows[n], k, v);
      ARK_VECTOR_LOOP
      for (int j = 0; j < ARK_CODES; ++j) ark_put(to, k + j, v[j]);
    }
  }
}
