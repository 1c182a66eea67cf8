// The input rows of a task, in registers: a thread has the elements ark_tid() + e * ARK_THREADS of
// each input row. `load` issues the loads of rows in plain memory. `take` loads rows of packets;
// all loads are in flight at once.
template <int K, int INPUTS, bool SLOTS>
struct ArkPacketRows {
  static constexpr int EACH = (K + ARK_THREADS - 1) / ARK_THREADS;
  float v[INPUTS][EACH];

  ARK_METHOD static int at(int e) {
    const int k = ark_tid() + e * ARK_THREADS;
    return k < K ? k : K - 1;
  }
  template <class X>
  ARK_METHOD static auto row(const X& x, int row, int slot, int k) {
    return ark_address(x, 0, SLOTS ? row : 0, SLOTS ? slot : row, k);
  }
  template <class X>
  ARK_METHOD void load(const X& x, int of, int slot) {
    if constexpr (!X::packets) {
#pragma unroll
      for (int s = 0; s < INPUTS; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) v[s][e] = ark_get(row(x, of, slot + s, at(e)), 0);
      }
    }
  }
  // Loads the packets of all input rows. meanwhile: called when the first loads of packets have
  // been issued.
  template <class X, class F>
  ARK_METHOD void take(ArkCtx& c, const X& x, int of, int slot, const F& meanwhile) {
    if constexpr (!X::packets) {
      meanwhile();
    } else {
      ark_u64 seen[INPUTS][EACH] = {};  // no epoch is 0
      const auto all = [&](const auto& each) {
#pragma unroll
        for (int s = 0; s < INPUTS; ++s) {
#pragma unroll
          for (int e = 0; e < EACH; ++e) each(seen[s][e], row(x, of, slot + s, at(e)));
        }
      };
      const auto ask = [&](ark_u64& word, const ark_u64* own) {
        if (!ark_packet_ready(c, word)) word = ark_packet_load(own, X::system);
      };
      all([&](ark_u64& word, const ark_u64* own) { word = ark_packet_load(own, X::system); });
      meanwhile();
      ark_u32 other = 0u;  // nonzero if any packet has another epoch
      all([&](ark_u64& word, const ark_u64*) {
        other |= static_cast<ark_u32>(word >> 32) ^ (c.iteration + 1u);
      });
      if (!ark_warp_all(other == 0u)) {
        // If packets are missing, a wave first polls only one packet, because polls of many packets
        // delay each other.
        const int k = static_cast<int>(c.processor * 61u % static_cast<ark_u32>(INPUTS * K));
        ark_wait_packet(c, row(x, of, slot + k / K, k % K), X::system);
        for (;;) {
          const ark_u64* late = nullptr;
          all(ask);
          all([&](ark_u64& word, const ark_u64* own) {
            if (!ark_packet_ready(c, word)) late = own;
          });
          if (late == nullptr || ark_failed(c)) break;
          ark_wait_packet(c, late, X::system);
        }
      }
#pragma unroll
      for (int s = 0; s < INPUTS; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) v[s][e] = ark_bits_float(static_cast<ark_u32>(seen[s][e]));
      }
    }
  }
};
