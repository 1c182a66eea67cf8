// The variant `matrix`: two warpgroups multiply, one thread of a third loads their operands through
// tensor maps into a ring of stages, and runs ahead of them over the tiles of one op. Ahead of the
// list's order it goes no further: what another op has written on this processor has no counter.

#define ARK_HAS_LOADER 1
constexpr ark_u32 ARK_MATRIX_STAGES = 4u;
constexpr ark_u32 ARK_MATRIX_STAGE = 49152u;  // bytes: 128 rows of a, up to 256 of b, 64 deep
constexpr ark_u32 ARK_MATRIX_SLAB = 8192u;    // 64 by 64 elements on their way out, one a warpgroup
constexpr int ARK_MATRIX_GROUPS = ARK_WARPS / 4;
static_assert(ARK_MATRIX_GROUPS == 2, "a tile has 128 rows");

struct ArkMatrixRing {
  ark_u64 full[ARK_MATRIX_STAGES];
  ark_u64 empty[ARK_MATRIX_STAGES];
  ark_u32 used[ARK_MATRIX_GROUPS];  // stages that a warpgroup has consumed since launch
  ark_u64 begun;    // how many tasks have begun since launch, and the last one's place
  ark_u32 leave;    // they have left the loop
  ark_u32 stopped;  // the loading thread has given up a wait
};

__shared__ ArkMatrixRing ark_matrix;

ARK_DEVICE char* ark_matrix_stage(ArkCtx& c, ark_u32 n) {
  const ark_u64 base = (reinterpret_cast<ark_u64>(ARK_SCRATCH(c)) + 1023u) & ~1023ull;
  return reinterpret_cast<char*>(base) + n % ARK_MATRIX_STAGES * ARK_MATRIX_STAGE;
}
ARK_DEVICE char* ark_matrix_slab(ArkCtx& c, int group) {
  return ark_matrix_stage(c, 0u) + ARK_MATRIX_STAGES * ARK_MATRIX_STAGE + group * ARK_MATRIX_SLAB;
}

ARK_DEVICE ark_u32 ark_shared_word(const ark_u32* p) {
  return *const_cast<const volatile ark_u32*>(p);
}

// Called by all threads before anything else.
ARK_DEVICE void ark_matrix_open() {
  if (threadIdx.x == 0) {
    for (ark_u32 i = 0u; i < ARK_MATRIX_STAGES; ++i) {
      ark_barrier_init(&ark_matrix.full[i], 1u);
      ark_barrier_init(&ark_matrix.empty[i], ARK_MATRIX_GROUPS);
    }
    ark_matrix.used[0] = ark_matrix.used[1] = ark_matrix.leave = ark_matrix.stopped = 0u;
    ark_matrix.begun = 0u;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
}
// Called by the computing threads when they have left the loop.
ARK_DEVICE void ark_matrix_close() {
  if (threadIdx.x == 0) *const_cast<volatile ark_u32*>(&ark_matrix.leave) = 1u;
}
// Called by them when a task begins: everything before it in the list is done.
ARK_DEVICE void ark_task_begins(ArkCtx& c) {
  if (threadIdx.x == 0) {
    const ark_u64 number = (ark_matrix.begun >> 32) + 1u;
    const ark_u32 at = ark_warp_load(&c.warps[0]) & ~ARK_GAVE_UP;
    __threadfence_block();
    *const_cast<volatile ark_u64*>(&ark_matrix.begun) = number << 32 | at;
  }
}

// Waits for a stage without a call, which would part the products before it from those behind. What
// the loading thread itself waits for has a budget and sees the abort word; when it stops, it says
// so. The warps then go on with what lies there, and stay together until the vote at the task's
// end.
ARK_DEVICE void ark_matrix_filled(ArkCtx& c, ark_u32 n) {
  ark_u64* barrier = &ark_matrix.full[n % ARK_MATRIX_STAGES];
  while (!ark_barrier_passed(barrier, n / ARK_MATRIX_STAGES & 1u)) {
    if (ark_shared_word(&ark_matrix.stopped) == 0u) continue;
    ark_give_up(c);
    break;
  }
}
// Loader: the stage that used the slot before has been given back; false when there is no use for
// more.
ARK_DEVICE bool ark_matrix_free(ark_u32 n) {
  ark_u64* barrier = &ark_matrix.empty[n % ARK_MATRIX_STAGES];
  while (!ark_barrier_passed(barrier, (n / ARK_MATRIX_STAGES + 1u) & 1u)) {
    if (ark_shared_word(&ark_matrix.leave) != 0u) return false;
  }
  return true;
}

// What a task's loading half gets: the running number of the next stage.
struct ArkMatrixLoad {
  ark_u32 issued;
  bool stopped;
};

ARK_DEVICE bool ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load);

// The waits of a task that the loader takes ahead of the computing warps.
ARK_DEVICE bool ark_matrix_ready(ArkCtx& c, const ArkTask& t) {
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, ARK_PARAMS(c)->counter_ops);
  for (ark_u32 w = t.wait_begin; w < t.wait_end; ++w) {
    const ArkCounterOp e = ops[w];
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    const bool system = (e.flags & 1u) != 0u;
    if (!ark_wait(c, ark_words(e.address), want, system, 1u, e.counter, ARK_PARAMS(c)->budget_ns)) {
      return false;
    }
  }
  return true;
}

// The loading thread's whole life. It follows the computing warps from task to task and runs ahead
// while the tiles are of one op; of the rest of its warpgroup nobody is needed.
ARK_DEVICE void ark_matrix_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkCtx& c = reinterpret_cast<ArkLoop*>(scratch)->ctx;
  const ArkTask* tasks = ARK_POINTER(const ArkTask, p->tasks);
  const ArkRange* ranges = ARK_POINTER(const ArkRange, p->ranges);
  ArkMatrixLoad load{0u, false};
  ark_u32 handled = 0u;
  while (!load.stopped && ark_shared_word(&ark_matrix.leave) == 0u) {
    const ark_u64 begun = *const_cast<const volatile ark_u64*>(&ark_matrix.begun);
    const ark_u32 number = static_cast<ark_u32>(begun >> 32);
    if (static_cast<ark_i32>(number - handled) <= 0) {
      __nanosleep(20);
      continue;
    }
    // A task with a loading half waits for it; others may pass by, and the iteration with them.
    __threadfence_block();
    ark_u32 at = static_cast<ark_u32>(begun);
    const ark_u32 end = ranges[c.phase * p->processors + processor].task_end;
    __threadfence_block();
    if (*const_cast<const volatile ark_u64*>(&ark_matrix.begun) != begun) continue;
    handled = number;
    const ark_u32 op = tasks[at].op;
    asm volatile("fence.proxy.async;" ::: "memory");
    if (!ark_dispatch_load(c, tasks[at], load)) continue;
    for (++at; at < end && tasks[at].op == op && !load.stopped; ++at, ++handled) {
      ark_warp_store(&c.warps[ARK_WARPS], at);
      if (!ark_matrix_ready(c, tasks[at])) {
        load.stopped = true;
        break;
      }
      asm volatile("fence.proxy.async;" ::: "memory");
      ark_dispatch_load(c, tasks[at], load);
    }
  }
  *const_cast<volatile ark_u32*>(&ark_matrix.stopped) = 1u;
  // A block must not end while copies into its shared memory are under way.
  const ark_u32 behind = load.issued < ARK_MATRIX_STAGES ? load.issued : ARK_MATRIX_STAGES;
  for (ark_u32 n = load.issued - behind; n != load.issued; ++n) {
    while (
        !ark_barrier_passed(&ark_matrix.full[n % ARK_MATRIX_STAGES], n / ARK_MATRIX_STAGES & 1u)) {
    }
  }
}

// Starts the copy of a box into shared memory; x is the innermost coordinate.
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, ark_u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(ark_shared_address(barrier))
      : "memory");
}
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, int i1, int i0,
                             ark_u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(i1), "r"(i0), "r"(ark_shared_address(barrier))
      : "memory");
}
ARK_DEVICE void ark_box_store(ark_u64 map, int x, int y, const char* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(ark_shared_address(from))
      : "memory");
}
ARK_DEVICE void ark_box_store(ark_u64 map, int x, int y, int i1, int i0, const char* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          map),
      "r"(x), "r"(y), "r"(i1), "r"(i0), "r"(ark_shared_address(from))
      : "memory");
}
ARK_DEVICE void ark_matrix_expect(ark_u64* barrier, ark_u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ark_shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// wgmma's description of an operand in shared memory: rows of 128 bytes, swizzled, in blocks of
// eight rows; `lead` is the distance of blocks of 64 elements side by side, in 16 bytes.
ARK_DEVICE ark_u64 ark_matrix_operand(const char* at, ark_u32 lead) {
  return (ark_shared_address(at) & 0x3ffffu) >> 4 | static_cast<ark_u64>(lead) << 16 | 64ull << 32 |
         1ull << 62;
}
// A barrier of one warpgroup.
ARK_DEVICE void ark_matrix_meet(int group) {
  __syncwarp();
  asm volatile("barrier.sync %0, 128;" ::"r"(2 + group) : "memory");
}
ARK_DEVICE ark_u32 ark_pack_pair(ark_bf16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
ARK_DEVICE ark_u32 ark_pack_pair(ark_f16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 64 columns of a warpgroup's sums into its slab, swizzled as the tensor map expects it.
template <typename T>
ARK_DEVICE void ark_matrix_slab_fill(char* slab, const float* d) {
  const int lane = ark_lane(), row = 16 * (ark_warp() % 4) + (lane & 15);
  T* type = nullptr;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int chunk = j + (lane >> 4);
    const ark_u32 to = ark_shared_address(slab) + row * 128 + ((chunk ^ (row & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(ark_pack_pair(type, d[4 * j], d[4 * j + 1])),
                 "r"(ark_pack_pair(type, d[4 * j + 2], d[4 * j + 3])),
                 "r"(ark_pack_pair(type, d[4 * j + 4], d[4 * j + 5])),
                 "r"(ark_pack_pair(type, d[4 * j + 6], d[4 * j + 7]))
                 : "memory");
  }
}
// The thread that stores: what was written is there for others, or may wait where nobody but the
// next tile of this op comes behind.
ARK_DEVICE void ark_matrix_written(ArkCtx& c, const ArkTask& t) {
  const ark_u32 at = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
  const ArkTask* slots = &t - at % ARK_SLOTS;
  const ArkRange* ranges = ARK_POINTER(const ArkRange, ARK_PARAMS(c)->ranges);
  const bool last = at + 1u >= ranges[c.phase * ARK_PARAMS(c)->processors + c.processor].task_end;
  if (!last && t.signal_begin == t.signal_end && slots[(at + 1u) % ARK_SLOTS].op == t.op) return;
  asm volatile("cp.async.bulk.wait_group 0;\n fence.proxy.async;" ::: "memory");
}
