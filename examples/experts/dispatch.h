// Sends the tokens of a mixture of experts to the ranks of their experts, and the results back. The
// experts are divided among ranks. This text is compiled unmodified for every vendor;
// docs/custom-ops.md lists the functions that it may use.
//
// A token is sent to a rank once if at least one of its experts is there. Only the device knows
// which tokens these are. A token's number determines its place in the receiver's memory. The place
// of a token that is not sent to this rank stays unused.

constexpr int GROUP = 128;  // elements that share a scale
constexpr int PACK = 16;    // elements of 8 bits in an access
// The elements of a group that one thread processes. If the lanes of a warp are too few for a
// group, a thread processes whole groups.
constexpr int PART = ARK_LANES < GROUP / PACK ? GROUP : PACK;
constexpr float LARGEST = 448.0f;  // of e4m3

// True if one of row m's experts is among those from FIRST to LAST, exclusive.
template <int FIRST, int LAST, int SLOTS, class E>
ARK_DEVICE bool chosen(const E& experts, int m) {
  int found = 0;
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) {  // without branches, so that all loads are in flight at once
    const int expert = *ark_address(experts, m, s);
    found |= static_cast<int>(expert >= FIRST) & static_cast<int>(expert < LAST);
  }
  return found != 0;
}

ARK_DEVICE ArkPack<ark_e4m3, PACK> codes_of(const float (&v)[PACK]) {
  ArkPack<ark_e4m3, PACK> codes;
#pragma unroll
  for (int i = 0; i < PACK; i += 2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(v[i + 1]), "f"(v[i]));
    codes.v[i].bits = static_cast<unsigned char>(both & 0xffu);
    codes.v[i + 1].bits = static_cast<unsigned char>(both >> 8);
#else
    ark_put(codes.v, i, v[i]);
    ark_put(codes.v, i + 1, v[i + 1]);
#endif
  }
  return codes;
}

// Stores rows, rounded to 8 bits with a scale for each group, in a rank's memory.
template <class Task, class X, class E, class C, class S>
ARK_DEVICE void dispatch_put(ArkCtx&, const Task& task, X x, E experts, C codes, S scales) {
  constexpr int WIDTH = decltype(task.h)::size, SLOTS = decltype(task.s)::size;
  constexpr int PARTS = WIDTH / PART, EACH = GROUP / PART;
  static_assert(WIDTH % GROUP == 0, "rows are whole groups");
  const int parts = (task.m.end - task.m.begin) * PARTS;
  // All lanes of a warp take part in each round, because the lanes of a group compute its scale
  // together.
  for (int first = 0; first < parts; first += ARK_THREADS) {
    const int part = first + ark_tid();
    const int m = task.m.begin + part / PARTS, at = part % PARTS * PART;
    const bool sent = part < parts && chosen<Task::first, Task::last, SLOTS>(experts, m);
    float v[PART], largest = 0.0f;
    for (int i = 0; i < PART; ++i) v[i] = 0.0f;
    if (sent) {
      const auto* from = ark_address(x, m, at);
#pragma unroll
      for (int i = 0; i < PART; i += 8) {
        const auto pack = ark_load_pack<8>(from + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[i + j] = ark_float(pack.v[j]);
          largest = v[i + j] > largest ? v[i + j] : -v[i + j] > largest ? -v[i + j] : largest;
        }
      }
    }
    if constexpr (EACH > 1) {
#pragma unroll
      for (int lane = 1; lane < EACH; lane *= 2) {
        const float other = ark_shfl_xor(largest, lane);
        largest = other > largest ? other : largest;
      }
    }
    if (!sent) continue;
    const float scale = largest > 0.0f ? largest / LARGEST : 1.0f, by = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < PART; i += PACK) {
      float scaled[PACK];
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        const float w = v[i + j] * by;
        scaled[j] = w > LARGEST ? LARGEST : w < -LARGEST ? -LARGEST : w;
      }
      ark_store_pack(ark_address(codes, m, at + i), codes_of(scaled));
    }
    if (at % GROUP == 0) *ark_address(scales, m, at / GROUP) = scale;
  }
}

// Converts rows that have arrived to numbers of y's type. Rows that were not sent to this rank are
// 0.
template <class Task, class C, class S, class E, class Y>
ARK_DEVICE void dispatch_take(ArkCtx&, const Task& task, C codes, S scales, E experts, Y y) {
  constexpr int PARTS = decltype(task.h)::size / PACK, SLOTS = decltype(task.s)::size;
  const int parts = (task.m.end - task.m.begin) * PARTS;
  for (int part = ark_tid(); part < parts; part += ARK_THREADS) {
    const int m = task.m.begin + part / PARTS, at = part % PARTS * PACK;
    const bool sent = chosen<Task::first, Task::last, SLOTS>(experts, m);
    ArkPack<ark_e4m3, PACK> given = {};
    float scale = 0.0f;
    if (sent) {
      given = ark_load_pack<PACK>(ark_address(codes, m, at));
      scale = *ark_address(scales, m, at / GROUP);
    }
#pragma unroll
    for (int i = 0; i < PACK; i += 8) {
      decltype(ark_load_pack<8>(ark_address(y, m, at))) pack;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        ark_put(pack.v, j, sent ? scale * ark_float(given.v[i + j]) : 0.0f);
      }
      ark_store_pack(ark_address(y, m, at + i), pack);
    }
  }
}

// Stores this rank's sums over its experts in the memory of the tokens' rank.
template <class Task, class X, class E, class Y>
ARK_DEVICE void combine_put(ArkCtx&, const Task& task, X x, E experts, Y there) {
  constexpr int PARTS = decltype(task.h)::size / 8, SLOTS = decltype(task.s)::size;
  const int parts = (task.m.end - task.m.begin) * PARTS;
  for (int part = ark_tid(); part < parts; part += ARK_THREADS) {
    const int m = task.m.begin + part / PARTS, at = part % PARTS * 8;
    if (!chosen<Task::first, Task::last, SLOTS>(experts, m)) continue;
    ark_store_pack(ark_address(there, m, at), ark_load_pack<8>(ark_address(x, m, at)));
  }
}

// Adds the sums that the ranks of a row's experts have stored, in the order of the ranks, beginning
// with this rank. Rounds the total once. The last operand is the result.
template <int RANK, class Task, class E, class Y>
ARK_DEVICE void add_shares(const Task&, const E&, int m, int at, const float (&sum)[8], Y y) {
  decltype(ark_load_pack<8>(ark_address(y, m, at))) pack;
#pragma unroll
  for (int j = 0; j < 8; ++j) ark_put(pack.v, j, sum[j]);
  ark_store_pack(ark_address(y, m, at), pack);
}
template <int RANK, class Task, class E, class G, class N, class... More>
ARK_DEVICE void add_shares(const Task& task, const E& experts, int m, int at, float (&sum)[8],
                           G got, N next, More... more) {
  constexpr int FIRST = RANK % Task::world * Task::each, SLOTS = decltype(task.s)::size;
  if (chosen<FIRST, FIRST + Task::each, SLOTS>(experts, m)) {
    const auto pack = ark_load_pack<8>(ark_address(got, m, at));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += ark_float(pack.v[j]);
  }
  add_shares<RANK + 1>(task, experts, m, at, sum, next, more...);
}
template <class Task, class E, class... G>
ARK_DEVICE void combine_add(ArkCtx&, const Task& task, E experts, G... shares_and_result) {
  constexpr int PARTS = decltype(task.h)::size / 8;
  const int parts = (task.m.end - task.m.begin) * PARTS;
  for (int part = ark_tid(); part < parts; part += ARK_THREADS) {
    float sum[8] = {};
    add_shares<Task::rank>(task, experts, task.m.begin + part / PARTS, part % PARTS * 8, sum,
                           shares_and_result...);
  }
}
