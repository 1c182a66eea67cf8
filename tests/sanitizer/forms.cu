// The ways in which ark's loop kernel orders shared memory between warps, each in a separate short
// kernel. They show whether a finding of compute-sanitizer on the loop is due to the loop or to the
// form of synchronisation. `forms NAME` runs one and checks its result; see __main__.py.

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kRounds = 16, kSlots = 2, kWords = 32, kWarps = 3;

enum Form {
  kNamed,          // bar.sync of two warps of three
  kTurns,          // barrier.arrive of one warp, barrier.sync of the other, and the reverse
  kVote,           // barrier.red of two warps of three
  kRegisters,      // kVote, the barrier's number and its count in registers
  kLeader,         // kVote behind work of lane 0 alone, in a loop in which a warp might be divided
  kDivided,        // kNamed in such a loop; lane 0 comes a trip later than the others, so one is
  kDividedVote,    // the same by barrier.red
  kWide,           // barrier.red of eight warps of twelve; the others have left
  kWideRegisters,  // the same, the barrier's number and its count in registers
  kWideLane,       // the same, but one lane of the ninth warp is still there
  kWideQuota,      // the same, and the warps have moved registers (setmaxnreg)
  kWideDivided,    // kDividedVote of eight warps of twelve, with that lane
  kOneStores,      // mbarriers: one lane arrives for its warp, after __syncwarp
  kOneRecords,     // the same, filled by 8-byte cp.async (roles.h)
  kOneBulk,        // the same, filled by bulk copies (stream.h)
  kAllStores,      // the three again, but every lane arrives for itself
  kAllRecords,
  kAllBulk,
  kEarlyWrite,     // kAllStores whose writer does not wait for the reader: a race
  kEarlyRead,      // kAllStores whose reader does not wait for the writer: a race
  kPolledWord,     // a growing word that one lane writes and others poll, volatile on both sides
  kPolledOrdered,  // the same by st.release and ld.acquire, one lane of a warp polling
  kPolledAtomic,   // the same by atomics (ark_ring.begun)
  kCounted,        // the last thread by an atomic count reads the stores of all (ark_batch_total)
  kForms
};
const char* const kNames[kForms] = {
    "named",       "turns",          "vote",          "registers",      "leader",
    "divided",     "divided-vote",   "wide",          "wide-registers", "wide-lane",
    "wide-quota",  "wide-divided",   "one-stores",    "one-records",    "one-bulk",
    "all-stores",  "all-records",    "all-bulk",      "early-write",    "early-read",
    "polled-word", "polled-ordered", "polled-atomic", "counted"};
__host__ __device__ constexpr bool every(Form f) { return f >= kAllStores; }
__host__ __device__ constexpr bool polls(Form f) { return f >= kPolledWord && f <= kPolledAtomic; }
__host__ __device__ constexpr bool bulk(Form f) { return f == kOneBulk || f == kAllBulk; }
__host__ __device__ constexpr bool records(Form f) { return f == kOneRecords || f == kAllRecords; }
__host__ __device__ constexpr bool votes(Form f) { return f >= kVote && f <= kDividedVote; }
__host__ __device__ constexpr bool wide(Form f) { return f >= kWide && f <= kWideDivided; }
__host__ __device__ constexpr bool race(Form f) { return f == kEarlyWrite || f == kEarlyRead; }

struct Shared {
  alignas(128) uint32_t slot[kSlots][kWords];
  uint64_t full[kSlots], empty[kSlots];
  uint32_t begun;  // 1 + the round that may begin
};

__device__ uint32_t at(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(barrier)), "r"(count) : "memory");
}
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(barrier)) : "memory");
}
__device__ void await(uint64_t* barrier, uint32_t parity) {
  uint32_t passed = 0;
  while (!passed) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(at(barrier)), "r"(parity)
        : "memory");
  }
}
template <Form F>
__device__ void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (every(F) || (threadIdx.x & 31u) == 0u) arrive(barrier);
}

template <Form F>
__device__ void fill(Shared& s, int slot, const uint32_t* from) {
  const uint32_t lane = threadIdx.x & 31u;
  constexpr uint32_t bytes = kWords * 4;
  if (bulk(F)) {
    if (lane != 0u) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(&s.full[slot])),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(at(s.slot[slot])),
        "l"(from), "r"(bytes), "r"(at(&s.full[slot]))
        : "memory");
    return;
  }
  if (records(F)) {
    if (lane < kWords / 2) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at(&s.slot[slot][2 * lane])),
                   "l"(from + 2 * lane)
                   : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    s.slot[slot][lane] = from[lane];
  }
  warp_arrive<F>(&s.full[slot]);
}

template <Form F>
__device__ void say(uint32_t* word, uint32_t value) {
  if (F == kPolledWord) *const_cast<volatile uint32_t*>(word) = value;
  if (F == kPolledAtomic) atomicExch(word, value);
  if (F == kPolledOrdered) {
    asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(at(word)), "r"(value) : "memory");
  }
}
template <Form F>
__device__ uint32_t said(uint32_t* word) {
  uint32_t value = 0u;
  if (F == kPolledWord) value = *const_cast<volatile uint32_t*>(word);
  if (F == kPolledAtomic) value = atomicAdd(word, 0u);
  if (F == kPolledOrdered) {
    asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];"
                 : "=r"(value)
                 : "r"(at(word))
                 : "memory");
  }
  return value;
}

// Lane 0 of warp 0 releases a round by writing a word that other warps poll, and releases the next
// round only after all lanes of these warps have arrived. So the only unordered access is a poll
// that still reads the old word.
template <Form F>
__device__ void polled(Shared& s, const uint32_t* from, uint32_t* to) {
  const uint32_t warp = threadIdx.x / 32u, lane = threadIdx.x & 31u;
  uint32_t sum = 0u;
  for (uint32_t i = 0u; i < kRounds; ++i) {
    const uint32_t slot = i % kSlots, parity = i / kSlots & 1u;
    if (warp == 0u) {
      if (lane == 0u) {
        __nanosleep(2000);
        __threadfence();
        say<F>(&s.begun, i + 1u);
      }
      await(&s.empty[slot], parity);
      continue;
    }
    uint32_t seen = i + 1u;
    if (F == kPolledWord || lane == 0u) {
      seen = said<F>(&s.begun);
      while (static_cast<int32_t>(seen - (i + 1u)) < 0) {
        __nanosleep(20);
        seen = said<F>(&s.begun);
      }
    }
    __syncwarp();
    __threadfence();
    asm volatile("fence.proxy.async;" ::: "memory");
    sum += from[i * kWords + (lane ^ 5u)] * seen;
    warp_arrive<F>(&s.empty[slot]);
  }
  if (warp == 1u) to[lane] = sum;
}

// Two warps take turns, as the warpgroups of attention do. A warp that has ended its turn arrives
// at the named barrier at which the other warp waits.
__device__ void turns(Shared& s, int i, const uint32_t* from, uint32_t& sum) {
  const uint32_t lane = threadIdx.x & 31u;
  if (threadIdx.x < 32u) {
    if (i > 0) asm volatile("barrier.sync 1, 64;" ::: "memory");
    s.slot[0][lane] = from[i * kWords + lane];
    asm volatile("barrier.arrive 2, 64;" ::: "memory");
  } else {
    asm volatile("barrier.sync 2, 64;" ::: "memory");
    sum += s.slot[0][lane ^ 5u] * (i + 1);
    if (i + 1 < kRounds) asm volatile("barrier.arrive 1, 64;" ::: "memory");
  }
}

// Two warps synchronise at barrier 1, as ark_sync and ark_all do.
template <Form F>
__device__ bool meet(bool vote) {
  __syncwarp();
  if (F == kDivided) {
    asm volatile("barrier.sync 1, 64;" ::: "memory");
    return vote;
  }
  uint32_t all;
  if (F == kRegisters || (wide(F) && F != kWide && F != kWideDivided)) {
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n"
        " barrier.red.and.pred q, %2, %3, p;\n selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<uint32_t>(vote)), "r"(blockDim.x / 96u), "r"(blockDim.x / 3u * 2u)
        : "memory");
  } else {
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n"
        " barrier.red.and.pred q, 1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<uint32_t>(vote)), "n"(wide(F) ? 256 : 64)
        : "memory");
  }
  return all != 0u;
}
// Warp 0 writes, warp 1 reads. The inner loop runs no iteration, because the first word is 0, but
// the compiler must assume that it may diverge a warp. A barrier then has two code paths: one for
// whole warps, and one for diverged warps, after WARPSYNC.COLLECTIVE, with its operands in a
// register.
template <Form F>
__device__ void voted(Shared& s, const uint32_t* from, uint32_t* to) {
  const uint32_t warp = threadIdx.x / 32u, lane = threadIdx.x & 31u;
  const volatile uint32_t* words = from;
  const bool comes_late = (F == kDivided || F == kDividedVote) && lane == 0u;
  bool late = comes_late;
  uint32_t sum = 0u;
  if (warp == 2u) return;
  for (uint32_t i = 0u; i < kRounds;) {
    if (late) {
      __nanosleep(2000);
      late = false;
      continue;
    }
    if (F == kLeader && lane == 0u) {
      while (words[0] != 0u) __nanosleep(20);
    }
    if (warp == 0u) s.slot[0][lane] = from[i * kWords + lane];
    if (!meet<F>(words[1] != 0u)) return;
    if (warp == 1u) sum += s.slot[0][lane ^ 5u] * (i + 1u);
    if (F >= kLeader) {
      for (uint32_t n = 0u; n < words[0]; ++n) {
        if (!meet<F>(words[n] != 0u)) return;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      }
    }
    if (!meet<F>(words[2] != 0u)) return;
    ++i;
    late = comes_late;
  }
  if (warp == 1u) to[lane] = sum;
}

// Eight of a block's twelve warps synchronise, as the computing warps of the kernel variant
// `matrix` do. Each of them writes a slot and then reads the slot of the next warp.
template <Form F>
__device__ void of_twelve(Shared& s, const uint32_t* from, uint32_t* to) {
  const uint32_t warp = threadIdx.x / 32u, lane = threadIdx.x & 31u, slot = warp % 8u;
  const volatile uint32_t* words = from;
  __shared__ uint32_t wide[8][kWords];
  if (warp >= 8u) {
    if (F == kWideQuota) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if constexpr (F >= kWideLane) {
      while (threadIdx.x == 256u && atomicAdd(&s.begun, 0u) < kRounds) __nanosleep(100);
    }
    return;
  }
  if (F == kWideQuota) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const bool comes_late = F == kWideDivided && threadIdx.x == 0u;
  bool late = comes_late;
  uint32_t sum = 0u;
  for (uint32_t i = 0u; i < kRounds;) {
    if (late) {
      __nanosleep(2000);
      late = false;
      continue;
    }
    wide[slot][lane] = from[i * kWords + lane];
    if (!meet<F>(words[1] != 0u)) return;
    sum += wide[(slot + 1u) % 8u][lane ^ 5u] * (i + 1u);
    if constexpr (F == kWideDivided) {
      for (uint32_t n = 0u; n < words[0]; ++n) {
        if (!meet<F>(words[n] != 0u)) return;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      }
    }
    if (!meet<F>(words[2] != 0u)) return;
    ++i;
    late = comes_late;
  }
  if (threadIdx.x == 0u) atomicExch(&s.begun, static_cast<uint32_t>(kRounds));
  if (warp == 1u) to[lane] = sum;
}

// Two warps each store a part of every round's words; the warp that increments the round's counter
// last adds up the parts. No address is used twice, so only the count orders the accesses.
__device__ void counted(const uint32_t* from, uint32_t* to) {
  __shared__ uint32_t part[kRounds][2][kWords], count[kRounds], total[kWords];
  const uint32_t warp = threadIdx.x / 32u, lane = threadIdx.x & 31u;
  if (threadIdx.x < kRounds) count[threadIdx.x] = 0u;
  if (warp == 0u) total[lane] = 0u;
  __syncthreads();
  uint32_t sum = 0u;
  for (uint32_t i = 0u; i < kRounds && warp < 2u; ++i) {
    part[i][warp][lane] = from[i * kWords + lane] * (warp == 0u ? i : 1u);
    __syncwarp();
    uint32_t before = 0u;
    if (lane == 0u) {
      __threadfence_block();
      before = atomicAdd(&count[i], 1u);
      __threadfence_block();
    }
    before = __shfl_sync(0xffffffffu, before, 0);
    __syncwarp();
    if (before == 1u) sum += part[i][0][lane ^ 5u] + part[i][1][lane ^ 5u];
  }
  atomicAdd(&total[lane], sum);
  __syncthreads();
  if (warp == 1u) to[lane] = total[lane];
}

// Warp 0 fills slots of shared memory, and each lane of warp 1 reads a word that another lane
// wrote. A third warp does not take part.
template <Form F>
__global__ void __launch_bounds__(384, 1) form(const uint32_t* from, uint32_t* to) {
  __shared__ Shared s;
  const uint32_t warp = threadIdx.x / 32u, lane = threadIdx.x & 31u;
  if (threadIdx.x == 0u) {
    for (int i = 0; i < kSlots; ++i) {
      init(&s.full[i], every(F) && !bulk(F) ? 32u : 1u);
      init(&s.empty[i], polls(F) ? 32u * (kWarps - 1u) : every(F) ? 32u : 1u);
    }
    s.begun = 0u;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if constexpr (F == kCounted) {
    counted(from, to);
    return;
  }
  if constexpr (polls(F)) {
    polled<F>(s, from, to);
    return;
  }
  if constexpr (wide(F)) {
    of_twelve<F>(s, from, to);
    return;
  }
  if constexpr (votes(F)) {
    voted<F>(s, from, to);
    return;
  }
  if (warp == 2u) return;
  uint32_t sum = 0u;
  for (int i = 0; i < kRounds; ++i) {
    const int slot = i % kSlots;
    const uint32_t parity = i / kSlots & 1u;
    if (F == kTurns) {
      turns(s, i, from, sum);
    } else if (F == kNamed) {
      if (warp == 0u) s.slot[slot][lane] = from[i * kWords + lane];
      asm volatile("barrier.sync 1, 64;" ::: "memory");
      if (warp == 1u) sum += s.slot[slot][lane ^ 5u] * (i + 1);
      asm volatile("barrier.sync 1, 64;" ::: "memory");
    } else if (warp == 0u) {
      if (F == kEarlyWrite) s.slot[slot][lane] = from[i * kWords + lane];
      await(&s.empty[slot], parity ^ 1u);
      fill<F>(s, slot, from + i * kWords);
    } else {
      const uint32_t early = F == kEarlyRead ? s.slot[slot][lane ^ 5u] : 0u;
      await(&s.full[slot], parity);
      sum += (F == kEarlyRead ? early : s.slot[slot][lane ^ 5u]) * (i + 1);
      warp_arrive<F>(&s.empty[slot]);
    }
  }
  if (warp == 1u) to[lane] = sum;
}

template <int F = 0>
void launch(int wanted, const uint32_t* from, uint32_t* to) {
  if constexpr (F < kForms) {
    if (F == wanted)
      form<static_cast<Form>(F)><<<1, 32 * (wide(static_cast<Form>(F)) ? 12 : kWarps)>>>(from, to);
    launch<F + 1>(wanted, from, to);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int wanted = 0;
  while (wanted < kForms && (argc < 2 || std::strcmp(argv[1], kNames[wanted]) != 0)) ++wanted;
  if (wanted == kForms) {
    for (const char* name : kNames) std::puts(name);
    return argc < 2 ? 0 : 2;
  }
  uint32_t in[kRounds * kWords], out[32], *from = nullptr, *to = nullptr;
  for (int i = 0; i < kRounds * kWords; ++i) in[i] = static_cast<uint32_t>(i) * 2654435761u;
  cudaMalloc(&from, sizeof in);
  cudaMalloc(&to, sizeof out);
  cudaMemcpy(from, in, sizeof in, cudaMemcpyHostToDevice);
  launch(wanted, from, to);
  const cudaError_t code = cudaMemcpy(out, to, sizeof out, cudaMemcpyDeviceToHost);
  if (code != cudaSuccess) {
    std::printf("%s: %s\n", kNames[wanted], cudaGetErrorString(code));
    return 1;
  }
  int wrong = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < kRounds; ++i) sum += in[i * kWords + (lane ^ 5u)] * (i + 1);
    wrong += sum != out[lane];
  }
  std::printf("%s: %d of 32 sums are wrong\n", kNames[wanted], wrong);
  return wrong && !race(static_cast<Form>(wanted)) ? 1 : 0;
}
