// Packs are vectors of neighbouring elements that one access loads or stores, at most 16 bytes.
// ark_get and ark_put access an element of a pack like an element in memory. A backend defines
// ARK_LOOSE_PACKS if its accesses are fast also where the address is not a multiple of the pack's
// size.
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
// A pack that is being loaded from any address, aligned or not. ark_load_loose starts the loads;
// ark_shifted waits for them and returns the pack. Backends on which unaligned accesses are slow
// load the aligned blocks of up to 16 bytes that the pack overlaps; each block has at least one
// byte of the pack.
#if defined(ARK_LOOSE_PACKS)
template <typename T, int N>
struct ArkLoosePack {
  ArkPack<T, N> pack;
};
template <typename T, int N>
ARK_DEVICE void ark_load_loose(ArkLoosePack<T, N>& to, const T* p) {
  to.pack = ark_load_pack<N>(p);
}
template <typename T, int N>
ARK_DEVICE ArkPack<T, N> ark_shifted(const ArkLoosePack<T, N>& from) {
  return from.pack;
}
#else
template <typename T, int N>
struct ArkLoosePack {
  static constexpr int SIZE = static_cast<int>(sizeof(T)), WORDS = (SIZE * N + 3) / 4;
  static constexpr int BLOCK = WORDS < 4 ? WORDS : 4, BLOCKS = WORDS / BLOCK;
  static_assert(BLOCK * BLOCKS == WORDS && (BLOCK & (BLOCK - 1)) == 0, "whole blocks");
  ArkPack<ark_u32, BLOCK> blocks[BLOCKS + 1];
  ark_u32 over;  // bytes of the first block before the pack
};
template <typename T, int N>
ARK_DEVICE void ark_load_loose(ArkLoosePack<T, N>& to, const T* p) {
  typedef ArkLoosePack<T, N> Loose;
  constexpr ark_u64 BYTES = 4u * Loose::BLOCK;
  const ark_u64 at = reinterpret_cast<ark_u64>(p), behind = at + Loose::SIZE * N - 1u;
  to.over = static_cast<ark_u32>(at % BYTES);
#pragma unroll
  for (int b = 0; b < Loose::BLOCKS; ++b) {
    to.blocks[b] =
        *reinterpret_cast<const ArkPack<ark_u32, Loose::BLOCK>*>((at & ~(BYTES - 1u)) + b * BYTES);
  }
  to.blocks[Loose::BLOCKS] =
      *reinterpret_cast<const ArkPack<ark_u32, Loose::BLOCK>*>(behind & ~(BYTES - 1u));
}
template <typename T, int N>
ARK_DEVICE ArkPack<T, N> ark_shifted(const ArkLoosePack<T, N>& from) {
  typedef ArkLoosePack<T, N> Loose;
  constexpr int WORDS = Loose::WORDS, BLOCK = Loose::BLOCK;
  ark_u32 w[WORDS + BLOCK];
#pragma unroll
  for (int i = 0; i < WORDS + BLOCK; ++i) w[i] = from.blocks[i / BLOCK].v[i % BLOCK];
#pragma unroll
  for (int step = BLOCK / 2; step > 0; step /= 2) {
    const bool moved = (from.over / 4u & static_cast<ark_u32>(step)) != 0u;
#pragma unroll
    for (int i = 0; i < WORDS + step; ++i) w[i] = moved ? w[i + step] : w[i];
  }
  union {
    ark_u32 words[WORDS];
    ArkPack<T, N> pack;
  } both;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const ark_u64 pair = static_cast<ark_u64>(w[i + 1]) << 32 | w[i];
    both.words[i] = Loose::SIZE < 4 ? static_cast<ark_u32>(pair >> from.over % 4u * 8u) : w[i];
  }
  return both.pack;
}
#endif
// A pack that is being loaded, kept as the 32-bit words that the load returns. If a compiler saw
// 16-bit elements, it would unpack them right after the load. The warp would then wait for the load
// too early, and the elements would need twice as many registers.
template <typename T, int N>
struct ArkWords {
  ArkPack<ark_u32, static_cast<int>(sizeof(T)) * N / 4> words;
};
template <typename T, int N, bool WORDS>
struct ArkHeldAs {
  typedef ArkPack<T, N> type;
};
template <typename T, int N>
struct ArkHeldAs<T, N, true> {
  typedef ArkWords<T, N> type;
};
template <typename T, int N>
struct ArkHeldAs<const T, N, true> {
  typedef ArkWords<T, N> type;
};
template <typename T, int N>
struct ArkHeldAs<const T, N, false> {
  typedef ArkPack<T, N> type;
};
#if defined(ARK_LOOSE_PACKS)
template <typename T, int N>
using ArkHeld = typename ArkHeldAs<T, N, false>::type;
#else
template <typename T, int N>
using ArkHeld = typename ArkHeldAs<T, N, (sizeof(T) < 4 && sizeof(T) * N % 4 == 0)>::type;
#endif
// An empty ArkHeld for a pack of N elements of the pointer's type.
template <int N, typename T>
ARK_DEVICE ArkHeld<T, N> ark_held(T*) {
  return {};
}
template <typename T, int N>
ARK_DEVICE void ark_hold(ArkPack<T, N>& to, const T* p) {
  to = ark_load_pack<N>(p);
}
template <typename T, int N>
ARK_DEVICE void ark_hold(ArkWords<T, N>& to, const T* p) {
  to.words =
      ark_load_pack<static_cast<int>(sizeof(T)) * N / 4>(reinterpret_cast<const ark_u32*>(p));
}
// Loads a pack that no other task reads, and that this task reads only once. On a backend whose
// first-level cache slows such loads down, the load does not allocate the 16 bytes there.
template <typename H, typename T>
ARK_DEVICE void ark_hold_past(H& to, const T* p) {
#if defined(ARK_HAS_LOAD_PAST)
  if constexpr (sizeof(H) == 16) {
    ark_load_past(p, &to);
    return;
  }
#endif
  ark_hold(to, p);
}
// Like ark_hold_past, for a pack that this task reads only once, though other tasks read it, too. A
// backend whose first-level cache is slow for data that a processor has just written defines a load
// of 16 bytes that bypasses this cache.
template <typename H, typename T>
ARK_DEVICE void ark_hold_once(H& to, const T* p) {
#if defined(ARK_HAS_LOAD_ONCE)
  if constexpr (sizeof(H) == 16) {
    ark_load_once(p, &to);
    return;
  }
#endif
  ark_hold(to, p);
}
template <typename T, int N>
ARK_DEVICE ArkPack<T, N> ark_unpacked(const ArkPack<T, N>& held) {
  return held;
}
template <typename T, int N>
ARK_DEVICE ArkPack<T, N> ark_unpacked(const ArkWords<T, N>& held) {
  union {
    ArkWords<T, N> words;
    ArkPack<T, N> pack;
  } both = {held};
  return both.pack;
}
// Stores a pack as 32-bit words, so that the compiler does not split the store into elements. A
// backend whose compiler would split the store of words too defines its own store of 16 bytes.
template <typename T, int N>
ARK_DEVICE void ark_store_held(const ArkPack<T, N>& held, T* p) {
  *reinterpret_cast<ArkPack<T, N>*>(p) = held;
}
template <typename T, int N>
ARK_DEVICE void ark_store_held(const ArkWords<T, N>& held, T* p) {
#if defined(ARK_HAS_STORE_WORDS)
  if constexpr (sizeof(held.words) == 16) {
    ark_store_words(p, held.words.v);
    return;
  }
#endif
  *reinterpret_cast<decltype(ArkWords<T, N>::words)*>(p) = held.words;
}
template <int N, typename T>
ARK_DEVICE void ark_store_pack(T* p, const ArkPack<T, N>& pack) {
  union {
    ArkPack<T, N> pack;
    ArkHeld<T, N> held;
  } both = {pack};
  ark_store_held(both.held, p);
}

// True if an address of device memory is aligned for packs of 16 bytes.
ARK_DEVICE bool ark_aligned(ark_u64 address) { return (address & 15u) == 0u; }

// Precedes loops over neighbouring elements whose rounds are independent. A backend may define it
// as a directive that makes the compiler vectorise the loop.
#if !defined(ARK_VECTOR_LOOP)
#define ARK_VECTOR_LOOP
#endif

// Converts an element to the type in which it is used in computations: floating-point types become
// float, integers stay as they are.
ARK_DEVICE float ark_plain(ark_f16 v) { return ark_float(v); }
ARK_DEVICE float ark_plain(ark_bf16 v) { return ark_float(v); }
template <typename T>
ARK_DEVICE T ark_plain(T v) {
  return v;
}

// 4-bit elements. Two share a byte; the first is in the low half. A pointer advances by bytes,
// whereas the index of ark_get and ark_put counts elements from the pointer on.
struct ark_int4 {
  unsigned char bits;
};
struct ark_uint4 {
  unsigned char bits;
};
struct ark_fp4 {  // sign, two exponent bits (bias 1), one mantissa bit
  unsigned char bits;
};
template <typename T>
ARK_DEVICE ark_u32 ark_half_byte(const T* p, ark_i64 i) {
  return static_cast<ark_u32>(p[i >> 1].bits) >> (static_cast<ark_u32>(i & 1) * 4u) & 15u;
}
template <typename T>
ARK_DEVICE void ark_put_half_byte(T* p, ark_i64 i, ark_u32 v) {
  const ark_u32 shift = static_cast<ark_u32>(i & 1) * 4u;
  const ark_u32 rest = static_cast<ark_u32>(p[i >> 1].bits) & (240u >> shift);
  p[i >> 1].bits = static_cast<unsigned char>(rest | (v & 15u) << shift);
}
ARK_DEVICE ark_i32 ark_get(const ark_uint4* p, ark_i64 i) {
  return static_cast<ark_i32>(ark_half_byte(p, i));
}
ARK_DEVICE ark_i32 ark_get(const ark_int4* p, ark_i64 i) {
  return static_cast<ark_i32>(ark_half_byte(p, i) ^ 8u) - 8;
}
ARK_DEVICE float ark_get(const ark_fp4* p, ark_i64 i) {
  const ark_u32 v = ark_half_byte(p, i), exponent = v >> 1 & 3u;
  const float size = exponent == 0u ? 0.5f * static_cast<float>(v & 1u)
                                    : ark_bits_float((exponent + 126u) << 23 | (v & 1u) << 22);
  return v & 8u ? -size : size;
}
template <typename V>
ARK_DEVICE void ark_put(ark_uint4* p, ark_i64 i, V v) {
  ark_put_half_byte(p, i, static_cast<ark_u32>(static_cast<ark_i32>(v)));
}
template <typename V>
ARK_DEVICE void ark_put(ark_int4* p, ark_i64 i, V v) {
  ark_put_half_byte(p, i, static_cast<ark_u32>(static_cast<ark_i32>(v)));
}
// Converts a float to 4-bit e2m1: rounds to the nearest (ties to even) of the magnitudes 0, 0.5, 1,
// 1.5, 2, 3, 4, 6. Larger magnitudes become 6.
ARK_DEVICE void ark_put(ark_fp4* p, ark_i64 i, float v) {
  const float a = v < 0.0f ? -v : v;
  const ark_u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                       (a >= 3.5f) + (a > 5.0f);
  ark_put_half_byte(p, i, code | (ark_float_bits(v) >> 28 & 8u));
}

// Element j of a pack, converted to the type in which it is used in computations.
template <typename T>
ARK_DEVICE auto ark_element(const T* v, int j) -> decltype(ark_get(v, 0)) {
  return ark_get(v, j);
}
ARK_DEVICE ark_i32 ark_element(const signed char* v, int j) { return v[j]; }
ARK_DEVICE ark_i32 ark_element(const unsigned char* v, int j) { return v[j]; }

// Loads or stores two neighbouring packets in 16 aligned bytes. Each packet is accessed atomically,
// but the two are not one atomic unit.
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
