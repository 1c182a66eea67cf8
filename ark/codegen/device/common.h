// Helpers of task bodies, written on the device ABI alone.

// An element's value as float, and back, for the storage types of tensors.
ARK_DEVICE float ark_get(const float* p, ark_i64 i) { return p[i]; }
ARK_DEVICE float ark_get(const ark_f16* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE float ark_get(const ark_bf16* p, ark_i64 i) { return ark_float(p[i]); }
ARK_DEVICE void ark_put(float* p, ark_i64 i, float v) { p[i] = v; }
ARK_DEVICE void ark_put(ark_f16* p, ark_i64 i, float v) { p[i] = ark_half(v); }
ARK_DEVICE void ark_put(ark_bf16* p, ark_i64 i, float v) { p[i] = ark_bfloat(v); }

// Sum over the block, the same value in every thread; scratch holds ARK_WARPS floats.
ARK_DEVICE float ark_block_sum(float v, float* scratch) {
  v = ark_warp_sum(v);
  if (ARK_WARPS == 1) return v;
  if (ark_lane() == 0) scratch[ark_warp()] = v;
  ark_sync();
  float total = 0.0f;
  for (int w = 0; w < ARK_WARPS; ++w) total += scratch[w];
  ark_sync();
  return total;
}

ARK_DEVICE float ark_block_max(float v, float* scratch) {
  v = ark_warp_max(v);
  if (ARK_WARPS == 1) return v;
  if (ark_lane() == 0) scratch[ark_warp()] = v;
  ark_sync();
  float best = scratch[0];
  for (int w = 1; w < ARK_WARPS; ++w) best = scratch[w] > best ? scratch[w] : best;
  ark_sync();
  return best;
}
