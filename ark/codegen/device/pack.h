// Neighbouring elements that one access moves, up to 16 bytes at a time. ark_get and ark_put take a
// pack's elements as they take memory's.
// A backend that moves them well from any address says ARK_LOOSE_PACKS.
#if defined(ARK_LOOSE_PACKS)
template <typename T, int N>
struct ArkPack {
  T v[N];
};
#else
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) ArkPack {
  T v[N];
};
#endif

template <int N, typename T>
ARK_DEVICE ArkPack<T, N> ark_load_pack(const T* p) {
  return *reinterpret_cast<const ArkPack<T, N>*>(p);
}
template <int N, typename T>
ARK_DEVICE void ark_store_pack(T* p, const ArkPack<T, N>& pack) {
  *reinterpret_cast<ArkPack<T, N>*>(p) = pack;
}

// Is device memory at this address aligned for whole packs?
ARK_DEVICE bool ark_aligned(ark_u64 address) { return (address & 15u) == 0u; }

// Loops over neighbouring elements whose rounds do not depend on each other: a backend whose
// compiler makes vectors of them may say so.
#if !defined(ARK_VECTOR_LOOP)
#define ARK_VECTOR_LOOP
#endif

// An element as what is computed with: floats of any size as float, integers as they are.
ARK_DEVICE float ark_plain(ark_f16 v) { return ark_float(v); }
ARK_DEVICE float ark_plain(ark_bf16 v) { return ark_float(v); }
template <typename T>
ARK_DEVICE T ark_plain(T v) {
  return v;
}

// Two neighbouring packets in 16 aligned bytes. Neither is torn; both together may be.
#if !defined(ARK_HAS_PACKET_PAIRS)
ARK_DEVICE void ark_packets_load(const ark_u64* p, ark_u64& first, ark_u64& second, bool system) {
  first = ark_packet_load(p, system);
  second = ark_packet_load(p + 1, system);
}
ARK_DEVICE void ark_packets_store(ark_u64* p, ark_u64 first, ark_u64 second, bool system) {
  ark_packet_store(p, first, system);
  ark_packet_store(p + 1, second, system);
}
#endif
