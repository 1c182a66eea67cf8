// Combines the shares (partial results) of several ranks element by element, 16 bytes at a time.
// Each share, and the result, is in plain memory or in packets {word, epoch}. Four packets hold 16
// bytes of elements. A thread that loads packets waits until they have arrived.

// The type in which elements are combined: floating-point types up to 32 bits as float, doubles and
// integers unchanged.
ARK_DEVICE float ark_term(float v) { return v; }
ARK_DEVICE float ark_term(ark_f16 v) { return ark_float(v); }
ARK_DEVICE float ark_term(ark_bf16 v) { return ark_float(v); }
ARK_DEVICE float ark_term(ark_e4m3 v) { return ark_float(v); }
ARK_DEVICE float ark_term(ark_e5m2 v) { return ark_float(v); }
ARK_DEVICE double ark_term(double v) { return v; }
ARK_DEVICE ark_i32 ark_term(signed char v) { return v; }
ARK_DEVICE ark_i32 ark_term(unsigned char v) { return v; }
ARK_DEVICE ark_i32 ark_term(ark_i32 v) { return v; }
ARK_DEVICE ark_u32 ark_term(ark_u32 v) { return v; }
ARK_DEVICE ark_i64 ark_term(ark_i64 v) { return v; }

ARK_DEVICE void ark_store_term(float& to, float v) { to = v; }
ARK_DEVICE void ark_store_term(ark_f16& to, float v) { to = ark_half(v); }
ARK_DEVICE void ark_store_term(ark_bf16& to, float v) { to = ark_bfloat(v); }
ARK_DEVICE void ark_store_term(ark_e4m3& to, float v) { to = ark_to_e4m3(v); }
ARK_DEVICE void ark_store_term(ark_e5m2& to, float v) { to = ark_to_e5m2(v); }
ARK_DEVICE void ark_store_term(double& to, double v) { to = v; }
ARK_DEVICE void ark_store_term(signed char& to, ark_i32 v) { to = static_cast<signed char>(v); }
ARK_DEVICE void ark_store_term(unsigned char& to, ark_i32 v) { to = static_cast<unsigned char>(v); }
ARK_DEVICE void ark_store_term(ark_i32& to, ark_i32 v) { to = v; }
ARK_DEVICE void ark_store_term(ark_u32& to, ark_u32 v) { to = v; }
ARK_DEVICE void ark_store_term(ark_i64& to, ark_i64 v) { to = v; }

// The operations by which two shares (partial results of ranks) are combined, element by element.
// If one of the elements is NaN, the result is NaN.
struct ArkJoinSum {};
struct ArkJoinProduct {};
struct ArkJoinMax {};
struct ArkJoinMin {};
template <typename A>
ARK_DEVICE A ark_join(ArkJoinSum, A a, A b) {
  return ark_plus(a, b);
}
template <typename A>
ARK_DEVICE A ark_join(ArkJoinProduct, A a, A b) {
  return ark_times(a, b);
}
template <typename A>
ARK_DEVICE A ark_join(ArkJoinMax, A a, A b) {
  return a > b || a != a ? a : b;
}
template <typename A>
ARK_DEVICE A ark_join(ArkJoinMin, A a, A b) {
  return a < b || a != a ? a : b;
}

template <typename T>
union ArkChunk {
  ArkPack<ark_u64, 2> pack;
  ark_u64 half[2];
  T v[16 / sizeof(T)];
};

// What a thread has to load: chunks of 16 bytes, of which it loads several before it uses any. Its
// chunks are number `first` and then every ARK_THREADS-th one below `end`. bytes: the size of all
// elements.
struct ArkChunks {
  ark_i64 first;
  ark_i64 end;
  ark_i64 bytes;
};
ARK_DEVICE ark_i64 ark_chunk(const ArkChunks& at, int b) {
  return at.first + static_cast<ark_i64>(b) * ARK_THREADS;
}

// The two ways to access plain memory: ArkWhole in whole aligned chunks, ArkPiecemeal element by
// element (at the end of an array and in unaligned arrays).
struct ArkWhole {};
struct ArkPiecemeal {};

template <int BATCH, typename T>
ARK_DEVICE void ark_load_chunks(ArkCtx&, ArkWhole, const T* p, const ArkChunks& at, bool,
                                ArkChunk<T> (&to)[BATCH]) {
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const ark_i64 chunk = ark_chunk(at, b);
    if (chunk < at.end) {
      to[b].pack = ark_load_pack<2>(reinterpret_cast<const ark_u64*>(p) + 2 * chunk);
    }
  }
}
template <int BATCH, typename T>
ARK_DEVICE void ark_load_chunks(ArkCtx&, ArkPiecemeal, const T* p, const ArkChunks& at, bool,
                                ArkChunk<T> (&to)[BATCH]) {
  constexpr int MANY = static_cast<int>(16 / sizeof(T));
  static_assert(BATCH == 1, "elements are taken one chunk at a time");
  const ark_i64 left = at.bytes / static_cast<ark_i64>(sizeof(T)) - at.first * MANY;
  to[0].half[0] = to[0].half[1] = 0u;
#pragma unroll  // constant indices keep the chunk in registers
  for (int e = 0; e < MANY; ++e) {
    if (e < left) to[0].v[e] = p[at.first * MANY + e];
  }
}

// The address of the first packet of a chunk that has not arrived in the current iteration; null if
// all have arrived.
ARK_DEVICE const ark_u64* ark_late(const ArkCtx& c, const ark_u64* p, const ark_u64 (&seen)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!ark_packet_ready(c, seen[i])) return p + i;
  }
  return nullptr;
}

// Loads chunks from packets. All packets are loaded at once, and those that have not arrived are
// loaded again. After ARK_PACKET_ROUNDS rounds without success, each further round waits for one
// missing packet, with a time limit.
constexpr int ARK_PACKET_ROUNDS = 24;
template <int BATCH, typename T, typename HOW>
ARK_DEVICE void ark_load_chunks(ArkCtx& c, HOW, const ark_u64* p, const ArkChunks& at, bool system,
                                ArkChunk<T> (&to)[BATCH]) {
  ark_u64 seen[BATCH][4] = {};  // no epoch is 0
  for (int round = 0;; ++round) {
    const ark_u64* late = nullptr;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const ark_u64* from = p + 4 * ark_chunk(at, b);
      if (ark_chunk(at, b) < at.end && ark_late(c, from, seen[b]) != nullptr) {
        ark_packets_load(from, seen[b][0], seen[b][1], system);
        ark_packets_load(from + 2, seen[b][2], seen[b][3], system);
      }
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const ark_u64* from = p + 4 * ark_chunk(at, b);
      if (ark_chunk(at, b) < at.end) {
        const ark_u64* first = ark_late(c, from, seen[b]);
        if (first != nullptr) late = first;
      }
    }
    if (late == nullptr || ark_failed(c)) break;
    if (round >= ARK_PACKET_ROUNDS) ark_wait_packet(c, late, system);
  }
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    to[b].half[0] = (seen[b][0] & 0xffffffffu) | (seen[b][1] << 32);
    to[b].half[1] = (seen[b][2] & 0xffffffffu) | (seen[b][3] << 32);
  }
}

template <typename T>
ARK_DEVICE void ark_store_chunk(ArkCtx&, ArkWhole, T* p, ark_i64 chunk, const ArkChunks&, bool,
                                const ArkChunk<T>& v) {
  ark_store_pack<2>(reinterpret_cast<ark_u64*>(p) + 2 * chunk, v.pack);
}
template <typename T>
ARK_DEVICE void ark_store_chunk(ArkCtx&, ArkPiecemeal, T* p, ark_i64 chunk, const ArkChunks& at,
                                bool, const ArkChunk<T>& v) {
  constexpr int MANY = static_cast<int>(16 / sizeof(T));
  const ark_i64 left = at.bytes / static_cast<ark_i64>(sizeof(T)) - chunk * MANY;
#pragma unroll
  for (int e = 0; e < MANY; ++e) {
    if (e < left) p[chunk * MANY + e] = v.v[e];
  }
}
// Stores a chunk as four packets, even if not all of them contain elements.
template <typename T, typename HOW>
ARK_DEVICE void ark_store_chunk(ArkCtx& c, HOW, ark_u64* p, ark_i64 chunk, const ArkChunks&,
                                bool system, const ArkChunk<T>& v) {
  const ark_u64 epoch = static_cast<ark_u64>(c.iteration + 1u) << 32;
  ark_u64* to = p + 4 * chunk;
  ark_packets_store(to, epoch | (v.half[0] & 0xffffffffu), epoch | (v.half[0] >> 32), system);
  ark_packets_store(to + 2, epoch | (v.half[1] & 0xffffffffu), epoch | (v.half[1] >> 32), system);
}

// A share (one rank's partial result), written by a peer or by this rank. P: the type in memory,
// which is T for plain memory or ark_u64 for packets.
template <typename P, bool SYSTEM>
struct ArkShare {
  static constexpr bool packets = false;
  P* p;
};
template <bool SYSTEM>
struct ArkShare<const ark_u64, SYSTEM> {
  static constexpr bool packets = true;
  const ark_u64* p;
};

// A destination that consists of N addresses in plain memory. The result is stored at each of them.
template <typename T, int N>
struct ArkEach {
  T* p[N];
};
template <typename T, typename HOW, typename Q, bool SYSTEM>
ARK_DEVICE void ark_give_chunk(ArkCtx& c, HOW how, const ArkShare<Q, SYSTEM>& out, ark_i64 chunk,
                               const ArkChunks& at, const ArkChunk<T>& v) {
  ark_store_chunk(c, how, out.p, chunk, at, SYSTEM, v);
}
template <typename T, typename HOW, int N>
ARK_DEVICE void ark_give_chunk(ArkCtx& c, HOW how, const ArkEach<T, N>& out, ark_i64 chunk,
                               const ArkChunks& at, const ArkChunk<T>& v) {
#pragma unroll
  for (int i = 0; i < N; ++i) ark_store_chunk(c, how, out.p[i], chunk, at, true, v);
}

// Loads the 16-byte chunks of some shares. With PACKETS, these are the shares that arrive in
// packets, otherwise the shares in plain memory. AT: the number of the first share.
template <bool PACKETS, int AT, int BATCH, typename T, typename HOW, int SHARES>
ARK_DEVICE void ark_load_shares(ArkCtx&, HOW, const ArkChunks&, ArkChunk<T> (&)[SHARES][BATCH]) {}
template <bool PACKETS, int AT, int BATCH, typename T, typename HOW, int SHARES, typename P,
          bool SYSTEM, typename... More>
ARK_DEVICE void ark_load_shares(ArkCtx& c, HOW how, const ArkChunks& at,
                                ArkChunk<T> (&to)[SHARES][BATCH], ArkShare<const P, SYSTEM> share,
                                More... more) {
  if (ArkShare<const P, SYSTEM>::packets == PACKETS) {
    ark_load_chunks<BATCH>(c, how, share.p, at, SYSTEM, to[AT]);
  }
  ark_load_shares<PACKETS, AT + 1, BATCH, T>(c, how, at, to, more...);
}

template <typename T, typename JOIN, int DIVIDE, int BATCH, typename HOW, typename Out,
          typename... Shares>
ARK_DEVICE void ark_combine_chunks(ArkCtx& c, HOW how, ArkChunks at, Out out, Shares... shares) {
  typedef decltype(ark_term(T())) A;
  constexpr int MANY = static_cast<int>(16 / sizeof(T));
  constexpr int SHARES = static_cast<int>(sizeof...(Shares));
  for (; at.first < at.end; at.first += BATCH * ARK_THREADS) {
    ArkChunk<T> v[SHARES][BATCH] = {};
    // Local data is loaded before the wait for data of peers.
    ark_load_shares<false, 0, BATCH, T>(c, how, at, v, shares...);
    ark_load_shares<true, 0, BATCH, T>(c, how, at, v, shares...);
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const ark_i64 chunk = ark_chunk(at, b);
      if (chunk >= at.end) continue;
      if (SHARES > 1 || DIVIDE != 1) {
#pragma unroll
        for (int e = 0; e < MANY; ++e) {
          A sum = ark_term(v[0][b].v[e]);
#pragma unroll
          for (int s = 1; s < SHARES; ++s) sum = ark_join(JOIN(), sum, ark_term(v[s][b].v[e]));
          ark_store_term(v[0][b].v[e], DIVIDE == 1 ? sum : sum / static_cast<A>(DIVIDE));
        }
      }
      ark_give_chunk(c, how, out, chunk, at, v[0][b]);
    }
  }
}

// Combines the ranks' shares element by element and stores the result; a single share is copied. A
// task processes bytes t.coord[0] * UNIT to t.coord[1] * UNIT.
template <typename T, typename JOIN, int UNIT, int DIVIDE, typename Out, typename... Shares>
ARK_DEVICE void ark_combine(ArkCtx& c, const ArkTask& t, bool aligned, Out out, Shares... shares) {
  constexpr int SHARES = static_cast<int>(sizeof...(Shares)), FEW = SHARES < 5 ? 2 : 1;
#if defined(ARK_HAS_LOADER)  // few threads, which have registers for more chunks in flight
  constexpr int BATCH = SHARES == 1 ? 16 : SHARES == 2 ? 8 : FEW;
#else
  constexpr int BATCH = SHARES < 3 ? 4 : FEW;
#endif
  const ark_i64 bytes = static_cast<ark_i64>(t.coord[1]) * UNIT;
  const ark_i64 begin = static_cast<ark_i64>(t.coord[0]) * UNIT / 16, end = (bytes + 15) / 16;
  const ark_i64 whole = aligned ? bytes / 16 : begin;
  ark_combine_chunks<T, JOIN, DIVIDE, BATCH>(
      c, ArkWhole(), ArkChunks{begin + ark_tid(), whole, bytes}, out, shares...);
  ark_combine_chunks<T, JOIN, DIVIDE, 1>(c, ArkPiecemeal(),
                                         ArkChunks{whole + ark_tid(), end, bytes}, out, shares...);
}
