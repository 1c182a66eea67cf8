// Simulates a thread block on the host. Its threads take turns, and each runs until it waits for
// others. Exchanges between lanes, barriers and matrix units therefore behave as on a GPU.
// Instructions are functions with their names (block_on_host.py inserts the calls). Asynchronous
// copies to shared memory complete either immediately or only when they are waited for, and threads
// take their turns in ascending or descending order. Code that relies on an order which CUDA does
// not guarantee fails in one of these modes.
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

extern char ark_shared[];
static size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<const char*>(p) - ark_shared;
}

constexpr unsigned HOST_MOST = 1024;
struct HostCopy {
  unsigned to;
  const char* from;
  unsigned bytes, size;
};
struct HostThread {
  ucontext_t context;
  std::vector<char> stack;
  const unsigned* awaited;  // continues when this is no longer `seen`; null: at once
  unsigned seen;
  bool ended;
  std::vector<std::vector<HostCopy>> groups;  // groups of copies, the last one not yet closed
};
struct HostWarp {
  unsigned arrived, rounds;
  void* given[32];
};
struct HostBarrier {
  unsigned arrived, count, rounds;
};
static HostThread host_threads[HOST_MOST];
static HostWarp host_warps[HOST_MOST / 32];
static HostBarrier host_barriers[16];
static ucontext_t host_main;
static bool host_late;

[[noreturn]] static void host_wrong(const char* what) {
  std::fprintf(stderr, "thread %u: %s\n", threadIdx.x, what);
  std::abort();
}
static void host_await(const unsigned& rounds, unsigned seen) {
  const unsigned own = threadIdx.x;
  host_threads[own].awaited = &rounds, host_threads[own].seen = seen;
  swapcontext(&host_threads[own].context, &host_main);
}

// Runs an operation of a whole warp, such as a shuffle: each lane passes its argument, and the last
// lane to arrive calls work() on the arguments of all lanes.
template <typename A, class Work>
static void host_together(A& own, const Work& work) {
  HostWarp& warp = host_warps[threadIdx.x / 32u];
  warp.given[threadIdx.x % 32u] = &own;
  if (++warp.arrived < 32u) return host_await(warp.rounds, warp.rounds);
  warp.arrived = 0u;
  work([&](unsigned lane) -> A& { return *static_cast<A*>(warp.given[lane]); });
  ++warp.rounds;
}
template <typename T>
static T host_exchange(T v, unsigned from) {
  struct Given {
    T v, got;
    unsigned from;
  } own{v, v, from};
  host_together(own, [](const auto& of) {
    for (unsigned lane = 0u; lane < 32u; ++lane) of(lane).got = of(of(lane).from % 32u).v;
  });
  return own.got;
}
template <typename T>
static T __shfl_sync(unsigned, T v, int from, int = 32) {
  return host_exchange(v, static_cast<unsigned>(from));
}
template <typename T>
static T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
  return host_exchange(v, (threadIdx.x % 32u) ^ static_cast<unsigned>(mask));
}
static unsigned __ballot_sync(unsigned, bool v) {
  struct Given {
    bool v;
    unsigned all;
  } own{v, 0u};
  host_together(own, [](const auto& of) {
    unsigned all = 0u;
    for (unsigned lane = 0u; lane < 32u; ++lane) all |= (of(lane).v ? 1u : 0u) << lane;
    for (unsigned lane = 0u; lane < 32u; ++lane) of(lane).all = all;
  });
  return own.all;
}
static int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v != 0) != 0u; }
static int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v != 0) == 0xffffffffu; }
static unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  for (int by = 16; by > 0; by /= 2) {
    const unsigned other = __shfl_xor_sync(mask, v, by);
    v = other > v ? other : v;
  }
  return v;
}
static unsigned __match_any_sync(unsigned, unsigned v) {
  struct Given {
    unsigned v, same;
  } own{v, 0u};
  host_together(own, [](const auto& of) {
    for (unsigned lane = 0u; lane < 32u; ++lane) {
      for (unsigned k = 0u; k < 32u; ++k) of(lane).same |= (of(k).v == of(lane).v ? 1u : 0u) << k;
    }
  });
  return own.same;
}
static void __syncwarp(unsigned = 0xffffffffu) { __ballot_sync(0xffffffffu, false); }

static void barrier_sync(unsigned number, unsigned count) {
  if (number >= 16u) host_wrong("a barrier that no block has");
  HostBarrier& barrier = host_barriers[number];
  if (barrier.arrived > 0u && barrier.count != count) host_wrong("a barrier of two sizes");
  barrier.count = count;
  if (++barrier.arrived < count) return host_await(barrier.rounds, barrier.rounds);
  barrier.arrived = 0u;
  ++barrier.rounds;
}

static void host_copy(const HostCopy& copy) {
  if (copy.to % copy.size != 0u || reinterpret_cast<size_t>(copy.from) % copy.size != 0u) {
    host_wrong("a copy that begins anywhere");
  }
  std::memset(ark_shared + copy.to, 0, copy.size);
  std::memcpy(ark_shared + copy.to, copy.from, copy.bytes);
}
static void host_ask(const HostCopy& copy) {
  auto& groups = host_threads[threadIdx.x].groups;
  if (groups.empty()) groups.emplace_back();
  host_late ? groups.back().push_back(copy) : host_copy(copy);
}
template <typename P>
static void cp_async_cg_shared_global(unsigned to, P from, unsigned size, unsigned bytes) {
  host_ask({to, reinterpret_cast<const char*>(from), bytes, size});
}
template <typename P>
static void cp_async_ca_shared_global(unsigned to, P from, unsigned size, unsigned bytes) {
  cp_async_cg_shared_global(to, from, size, bytes);
}
template <typename P>
static void cp_async_ca_shared_global(unsigned to, P from, unsigned size) {
  cp_async_cg_shared_global(to, from, size, size);
}
static void cp_async_commit_group() {
  auto& groups = host_threads[threadIdx.x].groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
static void cp_async_wait_group(unsigned left) {
  auto& groups = host_threads[threadIdx.x].groups;
  while (groups.size() > left + 1u) {
    for (const HostCopy& copy : groups.front()) host_copy(copy);
    groups.erase(groups.begin());
  }
}

static void cp_async_wait_all() {
  for (const auto& group : host_threads[threadIdx.x].groups) {
    for (const HostCopy& copy : group) host_copy(copy);
  }
  host_threads[threadIdx.x].groups.clear();
}
// Threads take turns and see each other's accesses in order.
static void fence_acq_rel_cta() {}

// Loads four tiles of 8 by 8 elements of 16 bits. Each lane passes the address of a row.
static void host_tiles(unsigned (&to)[4], unsigned at, bool turned) {
  struct Given {
    unsigned* to;
    unsigned at;
    bool turned;
  } own{to, at, turned};
  if (at % 16u != 0u) host_wrong("a tile's row that begins anywhere");
  host_together(own, [](const auto& of) {
    for (unsigned tile = 0u; tile < 4u; ++tile) {
      uint16_t v[8][8];
      for (unsigned r = 0u; r < 8u; ++r) std::memcpy(v[r], ark_shared + of(8u * tile + r).at, 16);
      for (unsigned lane = 0u; lane < 32u; ++lane) {
        const unsigned row = lane / 4u, column = lane % 4u * 2u;
        const bool by = of(lane).turned;
        const unsigned low = by ? v[column][row] : v[row][column];
        const unsigned high = by ? v[column + 1u][row] : v[row][column + 1u];
        of(lane).to[tile] = low | high << 16;
      }
    }
  });
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c,
                                                     unsigned& d, unsigned at) {
  unsigned v[4];
  host_tiles(v, at, false);
  a = v[0], b = v[1], c = v[2], d = v[3];
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c,
                                                           unsigned& d, unsigned at) {
  unsigned v[4];
  host_tiles(v, at, true);
  a = v[0], b = v[1], c = v[2], d = v[3];
}

static float host_wide_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
static float host_wide_f16(unsigned bits) {
  _Float16 v;
  const uint16_t low = static_cast<uint16_t>(bits);
  std::memcpy(&v, &low, 2);
  return static_cast<float>(v);
}
static unsigned host_narrow_bf16(float v) {
  const unsigned bits = __float_as_uint(v);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
static unsigned host_narrow_f16(float v) {
  const _Float16 narrow = static_cast<_Float16>(v);
  uint16_t bits;
  std::memcpy(&bits, &narrow, 2);
  return bits;
}
// d = a b + c for a 16 by 16 and a 16 by 8 tile, with the elements arranged as PTX describes.
struct HostProduct {
  float d[4];
  unsigned a[4], b[2];
};
template <class Wide>
static void host_multiply(HostProduct& own, const Wide& wide) {
  host_together(own, [&](const auto& of) {
    float a[16][16], b[16][8];
    for (unsigned lane = 0u; lane < 32u; ++lane) {
      const unsigned row = lane / 4u, column = lane % 4u * 2u;
      for (unsigned i = 0u; i < 8u; ++i) {  // register, half
        const unsigned word = of(lane).a[i / 2u] >> i % 2u * 16u & 0xffffu;
        a[row + i / 2u % 2u * 8u][column + i / 4u * 8u + i % 2u] = wide(word);
      }
      for (unsigned i = 0u; i < 4u; ++i) {
        b[column + i / 2u * 8u + i % 2u][row] = wide(of(lane).b[i / 2u] >> i % 2u * 16u & 0xffffu);
      }
    }
    for (unsigned lane = 0u; lane < 32u; ++lane) {
      for (unsigned e = 0u; e < 4u; ++e) {
        const unsigned row = lane / 4u + e / 2u * 8u, column = lane % 4u * 2u + e % 2u;
        for (unsigned k = 0u; k < 16u; ++k) of(lane).d[e] += a[row][k] * b[k][column];
      }
    }
  });
}
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2,
                                                                float& d3, unsigned a0, unsigned a1,
                                                                unsigned a2, unsigned a3,
                                                                unsigned b0, unsigned b1, float c0,
                                                                float c1, float c2, float c3) {
  HostProduct own{{c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}};
  host_multiply(own, host_wide_bf16);
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}
static void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2,
                                                              float& d3, unsigned a0, unsigned a1,
                                                              unsigned a2, unsigned a3, unsigned b0,
                                                              unsigned b1, float c0, float c1,
                                                              float c2, float c3) {
  HostProduct own{{c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}};
  host_multiply(own, host_wide_f16);
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}

static void ex2_approx_ftz_f32(float& to, float v) { to = std::exp2(v); }
static void rcp_approx_f32(float& to, float v) { to = 1.0f / v; }
static void rcp_approx_ftz_f32(float& to, float v) {
  const float made = 1.0f / v;
  to = std::fabs(v) < 1.17549435e-38f      ? std::copysign(INFINITY, v)
       : std::fabs(made) < 1.17549435e-38f ? std::copysign(0.0f, v)
                                           : made;
}
static void cvt_rn_bf16x2_f32(unsigned& to, float high, float low) {
  to = host_narrow_bf16(low) | host_narrow_bf16(high) << 16;
}
static void cvt_rn_f16x2_f32(unsigned& to, float high, float low) {
  to = host_narrow_f16(low) | host_narrow_f16(high) << 16;
}
template <typename H>
static void cvt_rn_bf16_f32(H& to, float v) {
  to = static_cast<H>(host_narrow_bf16(v));
}
template <typename H>
static void cvt_rn_f16_f32(H& to, float v) {
  to = static_cast<H>(host_narrow_f16(v));
}
template <typename H>
static void cvt_f32_f16(float& to, H v) {
  to = host_wide_f16(static_cast<unsigned>(v));
}
template <typename P>
static void ld_global_cg_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, P from) {
  unsigned words[4];
  std::memcpy(words, from, 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
template <typename P>
static void ld_global_L1__no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                             P from) {
  ld_global_cg_v4_u32(a, b, c, d, from);
}
template <typename P>
static void st_v4_u32(P to, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (reinterpret_cast<size_t>(to) % 16u != 0u) host_wrong("a store that begins anywhere");
  const unsigned words[4] = {a, b, c, d};
  std::memcpy(reinterpret_cast<char*>(to), words, 16);
}

// Runs work() in each of the given number of threads. late: asynchronous copies complete only when
// they are waited for. downwards: threads take their turns in descending order.
static void (*host_work)();
static void host_begin() {
  host_work();
  host_threads[threadIdx.x].ended = true;
}
static void host_run(unsigned threads, bool late, bool downwards, void (*work)()) {
  host_late = late, host_work = work;
  for (unsigned i = 0u; i < threads; ++i) {
    HostThread& thread = host_threads[i];
    thread.stack.resize(1u << 16);
    thread.awaited = nullptr, thread.ended = false, thread.groups.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &host_main;
    makecontext(&thread.context, host_begin, 0);
  }
  for (unsigned left = threads; left > 0u;) {
    bool moved = false;
    for (unsigned n = 0u; n < threads; ++n) {
      const unsigned i = downwards ? threads - 1u - n : n;
      HostThread& thread = host_threads[i];
      if (thread.ended || (thread.awaited != nullptr && *thread.awaited == thread.seen)) continue;
      moved = true, thread.awaited = nullptr, threadIdx.x = i;
      swapcontext(&host_main, &thread.context);
      left -= thread.ended ? 1u : 0u;
    }
    if (!moved) host_wrong("all threads wait for each other");
  }
  for (const HostBarrier& barrier : host_barriers) {
    if (barrier.arrived > 0u) host_wrong("threads are left at a barrier");
  }
}
