// One instruction of matrix units (mma.sync m16n8k16, fp32 sums): d += a b, where a has 16 by 16
// and b 16 by 8 elements of the pointer's type.
ARK_DEVICE void ark_mma(float (&d)[4], ark_u32 a0, ark_u32 a1, ark_u32 a2, ark_u32 a3, ark_u32 b0,
                        ark_u32 b1, const ark_bf16*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
ARK_DEVICE void ark_mma(float (&d)[4], ark_u32 a0, ark_u32 a1, ark_u32 a2, ark_u32 a3, ark_u32 b0,
                        ark_u32 b1, const ark_f16*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <typename T>
ARK_DEVICE void ark_mma(float (&d)[4], const uint4& a, ark_u32 b0, ark_u32 b1, const T* type) {
  ark_mma(d, a.x, a.y, a.z, a.w, b0, b1, type);
}

// Loads four tiles of 8 by 8 elements of 16 bits (ldmatrix). Lanes 8 n to 8 n + 7 pass the
// addresses of the 16-byte rows of tile n. From each tile, a lane gets two neighbouring elements of
// row lane / 4. The transposed form gives it two neighbouring elements of column lane / 4.
ARK_DEVICE void ark_load_tiles(ark_u32 (&v)[4], ark_u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at));
}
ARK_DEVICE void ark_load_tiles_turned(ark_u32 (&v)[4], ark_u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at));
}
