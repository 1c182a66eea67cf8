// Copies to a peer GPU through LDS (CDNA). Loads write LDS directly, without a register, and
// 16-byte stores send the data from LDS to the peer. Each wave has its own SLOTS pieces of LDS, so
// waves do not synchronise with each other. Loads to half of a wave's pieces are in flight at once.

// ARK_TO_LDS: the bytes that one load instruction writes to LDS for each lane. The architecture
// determines this size. ARK_BULK_PIECE: the size of a piece in bytes.
#if defined(__gfx950__)
constexpr int ARK_TO_LDS = 16;
#else
constexpr int ARK_TO_LDS = 4;
#endif
constexpr int ARK_BULK_PIECE = 16 * ARK_LANES;

typedef __attribute__((address_space(3))) char ark_lds_char;

// Issues the loads of a piece of a wave's data. Past the end, the last bytes are loaded again, so
// that each piece has the same number of loads.
ARK_DEVICE void ark_bulk_in(ark_lds_char* slot, ark_u64 from, ark_i64 left) {
  constexpr int EACH = ARK_TO_LDS * ARK_LANES;
#pragma unroll
  for (int i = 0; i < ARK_BULK_PIECE / EACH; ++i) {
    const ark_i64 at = i * EACH + ark_lane() * ARK_TO_LDS;
    const auto* place = (const ark_global<char>*)(from + (at < left ? at : left - ARK_TO_LDS));
    __builtin_amdgcn_global_load_lds((ark_global<void>*)place,
                                     (__attribute__((address_space(3))) void*)(slot + i * EACH),
                                     ARK_TO_LDS, 0, 0);
  }
}

// Returns this lane's 16 bytes of a piece as soon as all but the LATER newest loads have arrived.
// The loads are hidden from the compiler. If the compiler knew that they write LDS, it would wait
// for every load, including those of later pieces.
template <int LATER>
ARK_DEVICE ark_u32x4 ark_bulk_out(const ark_lds_char* slot) {
  ark_u32x4 found;
  asm volatile(
      "s_waitcnt vmcnt(%2)\n\t"
      "ds_read_b128 %0, %1\n\t"
      "s_waitcnt lgkmcnt(0)"
      : "=v"(found)
      : "v"((ark_u32)(ark_u64)slot + 16u * static_cast<ark_u32>(ark_lane())), "n"(LATER)
      : "memory");
  return found;
}

template <int SLOTS>
ARK_DEVICE void ark_bulk_pieces(char* scratch, ark_u64 from, ark_u64 to, ark_i64 bytes) {
  constexpr int LEAD = SLOTS / 2, LOADS = 16 / ARK_TO_LDS;
  constexpr ark_i64 STRIDE = static_cast<ark_i64>(ARK_BULK_PIECE) * ARK_WARPS;
  ark_lds_char* slots = (ark_lds_char*)scratch + ark_warp() * (SLOTS * ARK_BULK_PIECE);
  const ark_i64 first = static_cast<ark_i64>(ark_warp()) * ARK_BULK_PIECE;
  if (first >= bytes) return;
  const int pieces = static_cast<int>((bytes - first + STRIDE - 1) / STRIDE);
#pragma unroll 1
  for (int n = 0; n < pieces + LEAD; ++n) {
    const ark_i64 in = first + n * STRIDE;
    if (n < pieces) {
      ark_bulk_in(slots + n % SLOTS * ARK_BULK_PIECE, from + in, bytes - in);
    }
    const int m = n - LEAD;
    if (m < 0) continue;
    const ark_lds_char* slot = slots + m % SLOTS * ARK_BULK_PIECE;
    const ark_u32x4 found = n < pieces ? ark_bulk_out<LEAD * LOADS>(slot) : ark_bulk_out<0>(slot);
    const ark_i64 at = first + m * STRIDE + ark_lane() * 16;
    if (at < bytes) *(ark_global<ark_u32x4>*)(to + at) = found;
  }
}

// Copies part of `source` to `target`: bytes t.coord[0] * UNIT to t.coord[1] * UNIT. The last bytes
// that do not fill 16 bytes are copied one by one.
template <int UNIT, int SLOTS>
ARK_DEVICE void ark_bulk(ArkCtx& c, const ArkTask& t, ark_u64 source, ark_u64 target) {
  const ark_u64 first = static_cast<ark_u64>(t.coord[0]) * UNIT;
  const ark_i64 bytes = static_cast<ark_i64>(t.coord[1] - t.coord[0]) * UNIT;
  const ark_i64 whole = ark_aligned(source | target | first) ? bytes & ~15ll : 0;
  ark_bulk_pieces<SLOTS>(ARK_SCRATCH(c), source + first, target + first, whole);
  const unsigned char* from = ARK_POINTER(const unsigned char, source + first);
  unsigned char* to = ARK_POINTER(unsigned char, target + first);
  for (ark_i64 i = whole + ark_tid(); i < bytes; i += ARK_THREADS) to[i] = from[i];
}
