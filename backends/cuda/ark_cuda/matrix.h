// The kernel variant `matrix`. In each block, two warpgroups multiply. One thread of a third
// warpgroup, the loading thread, copies the operands of their products by TMA into a ring of stages
// in shared memory. Within an op it loads the next tiles while the warpgroups multiply earlier
// tiles. Before an op begins, the loading thread loads only those of its operands that no task of
// the launch writes. Other operands may be results of the op that is still running, and for results
// computed on the same processor there is no counter to wait for.

#define ARK_HAS_LOADER 1
// The ring has ARK_MATRIX_STAGES slots of ARK_MATRIX_STAGE bytes (tasks/matrix_ring.py). A slot
// holds 128 bytes along k of each row of the operands a and b, for the plan's largest tile. Before
// the ring are ARK_MATRIX_SLABS bytes of slabs: each warp has a slab, through which it stores
// results. Bodies that do not multiply may use the slabs too. ARK_LOAD_REGISTERS and
// ARK_COMPUTE_REGISTERS are the registers of a thread that loads or computes, set by the variant.
constexpr ark_u32 ARK_MATRIX_ROOM = 196608u;
constexpr ark_u32 ARK_MATRIX_SLAB = 2048u;  // a warp's slab: 16 by 64 elements of 16 bits
constexpr int ARK_MATRIX_GROUPS = ARK_WARPS / 4;
// The number of arrivals by which a stage's barrier releases the stage to the loading thread. Each
// computing warp arrives once. With tensor memory, only the hardware arrives, when the products of
// the stage are complete.
#ifdef ARK_HAS_TENSOR_MEMORY
constexpr ark_u32 ARK_MATRIX_READERS = 1u;
#else
constexpr ark_u32 ARK_MATRIX_READERS = ARK_WARPS;
#endif
static_assert(ARK_MATRIX_GROUPS == 2, "a tile is shared by two warpgroups");
static_assert(ARK_WARPS * ARK_MATRIX_SLAB == ARK_MATRIX_SLABS, "what the planner knows");
static_assert(ARK_MATRIX_STAGES * ARK_MATRIX_STAGE <= ARK_MATRIX_ROOM, "stages fit");
static_assert(ARK_MATRIX_STAGE % ARK_SHARED_ALIGNMENT == 0 &&
                  ARK_MATRIX_SLABS % ARK_SHARED_ALIGNMENT == 0,
              "operands begin where swizzled boxes must");

// A position in the ring: a slot, and the parity of the current phase of the slot's barriers. Both
// are kept in registers, because computing them from a stage number takes a division, which would
// delay the next product.
struct ArkMatrixSlot {
  ark_u32 slot, parity;
};
ARK_DEVICE void ark_matrix_next(ArkMatrixSlot& at) {
  if (++at.slot == ARK_MATRIX_STAGES) {
    at.slot = 0u;
    at.parity ^= 1u;
  }
}

// Moves a position in the ring back by `stages` stages, at most by one round of the ring.
ARK_DEVICE void ark_matrix_back(ArkMatrixSlot& at, ark_u32 stages = 1u) {
  if (at.slot < stages) {
    at.slot += ARK_MATRIX_STAGES;
    at.parity ^= 1u;
  }
  at.slot -= stages;
}

struct ArkMatrixRing {
  ark_u64 full[ARK_MATRIX_STAGES];
  ark_u64 empty[ARK_MATRIX_STAGES];
  ark_u32 used[ARK_WARPS];  // for each warp: the slot and the parity of its next stage
  // `begun`: 0 before the first task. Then the sequence number of the running task plus 1, or plus
  // 2 once the task's waits are complete. `leave`: 1 if the computing warps have left the loop.
  // Both are written by atomics.
  ark_u64 begun;
  ark_u32 leave;
  ark_u32 stopped;  // the loading thread has stopped after a failed wait
#ifdef ARK_HAS_TENSOR_MEMORY
  ark_u64 made;  // an mbarrier: a tile's sums are complete
  ark_u32 sums;  // the first column of the sums in tensor memory
#else
  // A word by which the loading thread tells the prefetching thread how far it is. Upper 24 bits:
  // the number of stages loaded so far for products whose weights are prefetched. Lowest 8 bits:
  // the number of stages of other products loaded since then.
  ark_u32 loaded;
#endif
  ark_u32 inputs;  // the task whose inputs its predecessor has loaded (attention_boxed.h)
};

#define ark_matrix (ark_static_at<ArkMatrixRing, 192, 512>())

// The base of a block's memory for tasks. It is computed as an offset from the start of shared
// memory, so that the compiler knows the address space. The slabs are the first part of this
// memory, and the stages follow. Bodies that use the slabs for other data use little of them and do
// not reach the stages.
constexpr ark_u32 ARK_MATRIX_BASE =
    (ARK_RING_BYTES + ARK_LOOP_BYTES + ARK_SHARED_ALIGNMENT - 1u) & ~(ARK_SHARED_ALIGNMENT - 1u);
ARK_DEVICE char* ark_matrix_slab(ArkCtx&, int warp) {
  return ark_shared + ARK_MATRIX_BASE + warp * ARK_MATRIX_SLAB;
}
ARK_DEVICE char* ark_matrix_stage(ArkCtx& c, ark_u32 slot) {
  return ark_matrix_slab(c, ARK_WARPS) + slot * ARK_MATRIX_STAGE;
}

ARK_DEVICE ark_u32 ark_shared_word(const ark_u32* p) {
  return *const_cast<const volatile ark_u32*>(p);
}

// Initialises the ring's barriers. Called by all threads when the kernel starts.
ARK_DEVICE void ark_matrix_open() {
  if (threadIdx.x == 0) {
    for (ark_u32 i = 0u; i < ARK_MATRIX_STAGES; ++i) {
      ark_barrier_init(&ark_matrix.full[i], 1u);
      ark_barrier_init(&ark_matrix.empty[i], ARK_MATRIX_READERS);
    }
    for (int w = 0; w < ARK_WARPS; ++w) ark_matrix.used[w] = 0u;
#ifdef ARK_HAS_TENSOR_MEMORY
    ark_barrier_init(&ark_matrix.made, 1u);
#endif
    ark_matrix.leave = ark_matrix.stopped = 0u;
    ark_matrix.inputs = ARK_NO_TASK;
#ifndef ARK_HAS_TENSOR_MEMORY
    ark_matrix.loaded = 0u;
#endif
    ark_matrix.begun = 0u;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
#ifdef ARK_HAS_TENSOR_MEMORY
  if (ark_warp() == 0) ark_sums_take(&ark_matrix.sums);
#endif
  __syncthreads();
}
// Sets the number of registers of each thread of a warpgroup. The loading warpgroup gives up most
// of its registers, and the computing warpgroups get them.
ARK_DEVICE void ark_matrix_loads_only() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(ARK_LOAD_REGISTERS));
}
ARK_DEVICE void ark_matrix_computes() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(ARK_COMPUTE_REGISTERS));
}
// Makes the loading thread end, and frees tensor memory. Called by the computing threads after they
// have left the loop.
ARK_DEVICE void ark_matrix_close() {
#ifdef ARK_HAS_TENSOR_MEMORY
  ark_sync();  // all reads of the sums are done
  if (ark_warp() == 0) ark_sums_give_back(ark_matrix.sums);
#endif
  if (threadIdx.x == 0) atomicExch(&ark_matrix.leave, 1u);
}
// A task's sequence number, by which the computing warps and the loading thread compare their
// progress. It consists of the iteration and twice the task's index in the task table. (The odd
// numbers in between mean that the task's waits are complete.)
constexpr ark_u64 ARK_MATRIX_TASK = 2u;  // the distance between the numbers of two tasks
ARK_DEVICE ark_u64 ark_matrix_place(ark_u32 iteration, ark_u32 at) {
  return static_cast<ark_u64>(iteration) << 32 | at * 2u;
}
// Called by the computing threads before the waits of task `at`: tells the loading thread that all
// earlier tasks of the list have ended.
ARK_DEVICE void ark_task_reached(const ArkCtx& c, ark_u32 at) {
  if (threadIdx.x == 0) atomicExch(&ark_matrix.begun, ark_matrix_place(c.iteration, at) + 1u);
}
// A fence within the block: other threads that see this thread's later stores also see its earlier
// ones.
ARK_DEVICE void ark_block_fence() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
// Called by the computing threads after the waits of a task: tells the loading thread that these
// waits are complete.
ARK_DEVICE void ark_task_begins(const ArkCtx& c) {
  if (threadIdx.x != 0) return;
  const ark_u32 at = ark_warp_load(&c.warps[0]) & ~ARK_GAVE_UP;
  ark_block_fence();  // what the task's waits have made visible
  atomicExch(&ark_matrix.begun, ark_matrix_place(c.iteration, at) + 2u);
}

// Waits for a stage. It is inlined, because a call would separate the products before the wait from
// those after it. barrier: the shared address of the stage's barrier. This wait needs no time
// limit: the loading thread's own waits have one and check the abort word, and when the loading
// thread stops, it sets a flag. The computing warps then continue with whatever data the stage
// holds, and find the failure at the end of the task.
ARK_DEVICE bool ark_matrix_passed(ark_u32 barrier, ark_u32 parity) {
  ark_u32 passed;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0u;
}
ARK_DEVICE void ark_matrix_filled(ArkCtx& c, ark_u32 full, ark_u32 parity) {
  while (!ark_matrix_passed(full, parity)) {
    if (ark_shared_word(&ark_matrix.stopped) == 0u) continue;
    ark_give_up(c);
    break;
  }
}
// Releases a stage on behalf of GROUPS warpgroups. When all computing warps have released it, the
// loading thread may overwrite it. empty: the address of the stage's barrier that counts releases.
template <ark_u32 GROUPS = 1u>
ARK_DEVICE void ark_matrix_release(ark_u32 empty) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty),
               "n"(GROUPS * (ARK_WARPS / ARK_MATRIX_GROUPS))
               : "memory");
}
// Releases a stage on behalf of this warp; called by one lane.
ARK_DEVICE void ark_matrix_release_warp(ark_u32 empty) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
}
// The position in the ring of this warp's next stage. ark_matrix_keep_place stored it at the end of
// the last task.
ARK_DEVICE ArkMatrixSlot ark_matrix_place_of() {
  const ark_u32 used = ark_warp_load(&ark_matrix.used[ark_warp()]);
  return ArkMatrixSlot{used >> 1 & 0xffu, used & 1u};
}
// Stores the position in the ring of this warp's next stage, for the next task. made: the parity
// that ark_matrix_made_parity is to return from now on.
ARK_DEVICE void ark_matrix_keep_place(const ArkMatrixSlot& at, ark_u32 made = 0u) {
  __syncwarp();
  ark_warp_store(&ark_matrix.used[ark_warp()], made << 16 | at.slot << 1 | at.parity);
  __syncwarp();
}
#ifdef ARK_HAS_TENSOR_MEMORY
// With tensor memory, an mbarrier signals that all sums of a tile are complete. Returns the parity
// of the phase that will complete for the next tile.
ARK_DEVICE ark_u32 ark_matrix_made_parity() {
  return ark_warp_load(&ark_matrix.used[ark_warp()]) >> 16;
}
#endif

// Bits of ArkTask.growth in this variant. They tell when the loading thread may load operands of a
// task. ALL: both operands, before the task begins. RIGHT: the right operand, before the task
// begins. BESIDE: operands that the preceding task does not write may be loaded as soon as that
// task has performed its waits.
constexpr ark_u32 ARK_LOADS_ALL = 1u, ARK_LOADS_RIGHT = 2u, ARK_LOADS_BESIDE = 4u;

// The state of the loading thread, which it passes to a task's loading function. The prefetching
// thread has such a state, too, and calls the same functions.
// - at: the position of the next stage.
// - issued: the number of stages loaded so far, counted up to one round of the ring.
// - begun: of this many stages, from the next one on, only the right operand was loaded.
// - early: true if the function is to load only right operands and return. It is called again for
//   the left ones.
// - whole: set by the function of a task that uses the stages' memory in a layout of its own.
// - ahead: true in the prefetching thread.
// - loaded: the value of ArkMatrixRing.loaded that the loading thread has stored, or that the
//   prefetching thread has read last.
// - walked: the number of stages that the prefetching thread has passed.
// - clock: when the prefetching thread last prefetched a stage or saw that another one was loaded.
struct ArkMatrixLoad {
  ArkMatrixSlot at;
  ark_u32 issued, begun;
  bool early, stopped, whole, ahead;
  ark_u32 loaded, walked, clock;
};
// Called by the loading thread: tells the prefetching thread that a stage is loaded. ahead: true if
// the stage belongs to a product that is prefetched.
ARK_DEVICE void ark_matrix_loaded(ArkMatrixLoad& load, bool ahead) {
#ifndef ARK_HAS_TENSOR_MEMORY
  if (ARK_MATRIX_AHEAD == 0u) return;
  const ark_u32 others = ahead ? 0u : load.loaded + 1u & 255u;
  load.loaded = (load.loaded & ~255u) + (ahead ? 256u : 0u) + others;
  *const_cast<volatile ark_u32*>(&ark_matrix.loaded) = load.loaded;
#endif
}
// Called by the loading thread: true if the computing warps have left the loop.
ARK_DEVICE bool ark_matrix_left() { return atomicAdd(&ark_matrix.leave, 0u) != 0u; }
// Called by the loading thread: waits until all computing warps have read the stage in the next
// slot, so that the slot may be overwritten. Returns false if no more stages are needed.
ARK_DEVICE bool ark_matrix_free(const ArkMatrixLoad& load) {
  const ark_u32 empty = ark_shared_address(&ark_matrix.empty[load.at.slot]);
  while (!ark_matrix_passed(empty, load.at.parity ^ 1u)) {
    if (ark_matrix_left()) return false;
  }
  return true;
}
ARK_DEVICE void ark_matrix_issued(ArkMatrixLoad& load) {
  ark_matrix_next(load.at);
  if (load.issued < ARK_MATRIX_STAGES) ++load.issued;
}
// Called by the loading thread: waits until all loaded stages have been released by the computing
// warps. Returns false if the computing warps have left the loop.
ARK_DEVICE bool ark_matrix_drained(const ArkMatrixLoad& load) {
  bool fine = true;
  ArkMatrixLoad each = load;
  for (ark_u32 i = 0u; i < ARK_MATRIX_STAGES; ++i) {
    fine = fine && ark_matrix_free(each);
    ark_matrix_next(each.at);
  }
  return fine;
}

// Makes other threads' ordinary stores visible to asynchronous copies. This waits until earlier
// stores of the block have arrived in memory.
ARK_DEVICE void ark_proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Like ark_proxy_fence, for stores that have arrived in memory already, such as those before an
// awaited signal. This fence does not wait for memory.
ARK_DEVICE void ark_proxy_fence_arrived() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Prefetches a tensor map to the processor's cache of tensor maps.
ARK_DEVICE void ark_map_ahead(ark_u64 map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The loading thread's copy of the record of its next task and of the task's first waits. They are
// copied while earlier tasks run. If they were loaded from device memory after the waits, each load
// would delay the task's first copies by more than 0.2 us, because an acquire invalidates the L1
// cache.
constexpr ark_u32 ARK_MATRIX_WAITS = 4u;
struct ArkMatrixNext {
  ArkTask task;
  ArkCounterOp waits[ARK_MATRIX_WAITS];
};
#define ark_matrix_next_task (ark_static_at<ArkMatrixNext, 768, 1024>())
ARK_DEVICE void ark_matrix_copy_ahead(const ArkTask& task, const ArkCounterOp* ops) {
  ArkMatrixNext& own = ark_matrix_next_task;
  constexpr ark_u32 WORDS = sizeof(ArkTask) / 8u, EACH = sizeof(ArkCounterOp) / 8u;
#pragma unroll 1
  for (ark_u32 i = 0u; i < WORDS; ++i) {
    ark_copy_ahead(reinterpret_cast<ark_u64*>(&own.task) + i,
                   reinterpret_cast<const ark_u64*>(&task) + i);
  }
  const ark_u32 count = task.wait_end - task.wait_begin;
  const ark_u32 words = EACH * (count < ARK_MATRIX_WAITS ? count : ARK_MATRIX_WAITS);
  const ark_u64* waits = reinterpret_cast<const ark_u64*>(ops + task.wait_begin);
#pragma unroll 1
  for (ark_u32 i = 0u; i < words; ++i) {
    ark_copy_ahead(reinterpret_cast<ark_u64*>(own.waits) + i, waits + i);
  }
}

// Functions of the generated source. `kind`: the number of a device function. ark_loads: true if
// the device function has a part for the loading thread. ark_maps: 16 times the index of the first
// tensor map in a task's record, plus the number of tensor maps. ark_spares_stages: true if the
// device function has no part for the loading thread and does not use the memory of the stages.
ARK_DEVICE bool ark_loads(ark_u32 kind);
ARK_DEVICE ark_u32 ark_maps(ark_u32 kind);
ARK_DEVICE bool ark_spares_stages(ark_u32 kind);
ARK_DEVICE void ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load);

// Called by the loading thread: true if the task with this sequence number, or a later one, has
// been reached. All tasks before it in the list have then ended.
ARK_DEVICE bool ark_matrix_reached(ark_u64 place) {
  ark_u64 begun;
  asm volatile("ld.relaxed.cta.shared::cta.u64 %0, [%1];"
               : "=l"(begun)
               : "r"(ark_shared_address(&ark_matrix.begun))
               : "memory");
  return begun > place;
}
// Called by the loading thread: waits until the task with this sequence number, or a later one, has
// been reached. Returns false if the computing warps have left the loop.
ARK_DEVICE bool ark_matrix_await(ark_u64 place) {
  while (!ark_matrix_reached(place)) {
    if (ark_matrix_left()) return false;
    __nanosleep(20);
  }
  return true;
}
// Called by the loading thread: true if the computing warps have performed the waits of the task
// with this sequence number.
ARK_DEVICE bool ark_matrix_others_waited(ark_u64 place) {
  if (!ark_matrix_reached(place + 1u)) return false;
  ark_block_fence();
  return true;
}
// Called by the loading thread: waits until the computing warps have performed the waits of the
// task with this sequence number. Returns false if the computing warps have left the loop.
ARK_DEVICE bool ark_matrix_waited(ark_u64 place) {
  const bool fine = ark_matrix_await(place + 1u);
  ark_block_fence();
  return fine;
}
// Called by the loading thread: waits for the counters of its next task, at the same time as the
// computing warps. Returns false if the computing warps have left the loop. This wait needs no time
// limit, because the wait of the computing warps has one. The computing warps perform a task's
// waits in parallel. If they complete all of them first, this thread does not read the remaining
// counters, each of which costs an access to memory.
ARK_DEVICE bool ark_matrix_ready(const ArkParams* p, ark_u64 place, ark_u32 phase_iteration) {
  const ArkMatrixNext& own = ark_matrix_next_task;
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, p->counter_ops) + own.task.wait_begin;
  const ark_u32 count = own.task.wait_end - own.task.wait_begin;
  for (ark_u32 w = 0u; w < count; ++w) {
    if (ark_matrix_others_waited(place)) return true;
    const ArkCounterOp e = w < ARK_MATRIX_WAITS ? own.waits[w] : ops[w];
    const ark_u32 want = e.step * phase_iteration + e.value;
    const bool system = (e.flags & 1u) != 0u;
    while (static_cast<ark_i32>(ark_load_acquire(ark_words(e.address), system) - want) < 0) {
      if (ark_matrix_left()) return false;
      if (ark_matrix_others_waited(place)) return true;
      __nanosleep(20);
    }
  }
  return true;
}

// The createpolicy words for two L2 eviction priorities of copied data: evict_normal (STAYS) and
// evict_first (LEAVES).
constexpr ark_u64 ARK_BOX_STAYS = 0x1000000000000000ull, ARK_BOX_LEAVES = 0x12f0000000000000ull;

// Starts a box copy (TMA) to shared memory from the coordinates x (innermost) and y. keep: the L2
// eviction priority.
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, ark_u64* barrier,
                             ark_u64 keep = ARK_BOX_STAYS) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(ark_shared_address(barrier)), "l"(keep)
      : "memory");
}
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, int z, ark_u64* barrier,
                             ark_u64 keep = ARK_BOX_STAYS) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(ark_shared_address(barrier)), "l"(keep)
      : "memory");
}
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, int i1, int i0, ark_u64* barrier,
                             ark_u64 keep = ARK_BOX_STAYS) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(i1), "r"(i0), "r"(ark_shared_address(barrier)), "l"(keep)
      : "memory");
}
// Starts the copy of the pixels that consecutive convolution windows read, through an im2col tensor
// map. The first window begins at pixel (x, y) of image i0. across, down: the column and the row of
// the kernel element that multiplies these pixels.
ARK_DEVICE void ark_window_load(char* to, ark_u64 map, int channel, int x, int y, int i0,
                                int across, int down, ark_u64* barrier, ark_u64 keep) {
  asm volatile(
      "{\n .reg .b16 s, r;\n cvt.u16.u32 s, %7;\n cvt.u16.u32 r, %8;\n"
      " cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], {s, r}, %9;\n}" ::"r"(
          ark_shared_address(to)),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(i0), "r"(ark_shared_address(barrier)),
      "r"(across), "r"(down), "l"(keep)
      : "memory");
}
ARK_DEVICE void ark_matrix_expect(ark_u64* barrier, ark_u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ark_shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Like ark_matrix_expect, for a part of a stage: announces the bytes without an arrival on the
// barrier, because other parts follow.
ARK_DEVICE void ark_matrix_expect_part(ark_u64* barrier, ark_u32 bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(ark_shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// The main function of the loading thread. It calls no function, because a compiled call may use
// registers that this warpgroup has released. The other threads of its warp are idle. The thread
// walks the task list independently of the computing warps. It never runs past a task that uses the
// stages' memory for something else.
//
// The time of an operand's copy depends on its writer. An operand that is read-only during the
// launch is copied as soon as stages are free, even in the preceding iteration, so that the barrier
// between iterations costs no memory latency. If only the right operand (weights) is read-only, it
// is copied to all free stages, and the left one follows. Rows of a growing cache are copied as
// soon as their iteration has begun. Any other operand is copied when its task has been reached and
// the task's counters allow it. Reaching the task is not required if the preceding task has
// performed its waits, and belongs to the same op or does not write the operand.
ARK_DEVICE void ark_matrix_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkCtx& c = reinterpret_cast<ArkLoop*>(scratch)->ctx;
  const ArkPhases phases = ark_phases(p);
  ArkMatrixLoad load{};
  // The sequence number of the task after the last task that uses the stages' memory for other
  // data. Once the computing warps have reached it, the stages may be loaded.
  ark_u64 spared = 0u;
  // In persistent mode the host may write between iterations, so nothing is loaded ahead of them.
  const ark_u32 ahead = p->persistent != 0u ? 0u : 1u;
  for (ark_u32 iteration = p->first; !load.stopped; ++iteration) {
    if (p->end != 0u && iteration == p->end) break;  // another kernel runs the next phases
    const bool first = iteration == p->first && ahead != 0u;
    if (!first && !ark_matrix_await(ark_matrix_place(iteration - ahead, 0u))) break;
    const ArkRange range = ark_range(p, processor, iteration, phases);
    ark_u32 op = ARK_NO_TASK;
    for (ark_u32 at = range.task_begin; at < range.task_end && !load.stopped; ++at) {
      const ArkTask& task = ARK_POINTER(const ArkTask, p->tasks)[at];
      const ark_u64 place = ark_matrix_place(iteration, at);
      const bool follows = task.op == op || (task.growth & ARK_LOADS_BESIDE) != 0u;
      op = task.op;
      if (!ark_loads(task.kind)) {
        if (!ark_spares_stages(task.kind)) spared = place + ARK_MATRIX_TASK;
        continue;
      }
      // True if the task reads rows of a cache that grows (keys and values). Only rows that were
      // written before this iteration are loaded.
      const bool grows = task.fetch_end != task.fetch_begin;
      const bool waits = !grows && (task.growth & ARK_LOADS_ALL) == 0u;
      if (waits) ark_matrix_copy_ahead(task, ARK_POINTER(const ArkCounterOp, p->counter_ops));
      const ark_u32 maps = ark_maps(task.kind);
#pragma unroll 1
      for (ark_u32 i = 0u; i < maps % 16u; ++i) ark_map_ahead(task.operand[maps / 16u + i]);
      bool fine = ark_matrix_await(spared) && (!load.whole || ark_matrix_drained(load));
      load.whole = false;
      // After the waits of the iteration's first task, this thread sees the rows of a growing
      // cache.
      if (grows) fine = fine && ark_matrix_waited(ark_matrix_place(iteration, range.task_begin));
      load.early = fine && !grows && (task.growth & ARK_LOADS_RIGHT) != 0u;
      while (fine) {
        const bool late = waits && !load.early;
        if (late) {
          fine = ark_matrix_await(follows ? place - 1u : place);
          if (!fine) break;
        }
        ark_proxy_fence();
        if (late) {
          ark_copies_done();
          fine = ark_matrix_ready(p, place, ark_phase_iteration(phases, iteration));
          if (!fine) break;
          ark_proxy_fence_arrived();
        }
        ark_dispatch_load(c, late ? ark_matrix_next_task.task : task, load);
        if (!load.early) break;
        ark_matrix_back(load.at, load.begun);
        load.early = false;
        fine = !load.stopped;
      }
      load.stopped = load.stopped || !fine;
    }
  }
  // When the thread stops, some stages may have only their right operand. For each of these, 0
  // bytes are announced for the missing operand, so that the stage's barrier completes.
  for (; load.begun > 0u; --load.begun) {
    ark_matrix_expect(&ark_matrix.full[load.at.slot], 0u);
    ark_matrix_issued(load);
  }
  // Tells the computing warps that no more stages will be loaded, so that no warp waits for a stage
  // for ever after a failure. In a launch that succeeds, all stages for which a warp waits have
  // been loaded.
  if (load.stopped && !ark_matrix_left()) *const_cast<volatile ark_u32*>(&ark_matrix.stopped) = 1u;
  // A block must not end while copies to its shared memory are in flight.
  for (ark_u32 slot = 0u; slot < load.issued; ++slot) {
    const ark_u32 full = ark_shared_address(&ark_matrix.full[slot]);
    const ark_u32 parity = slot < load.at.slot ? load.at.parity : load.at.parity ^ 1u;
    while (!ark_matrix_passed(full, parity)) {
    }
  }
}

#ifndef ARK_HAS_TENSOR_MEMORY
// While the ring is full and the loading thread waits for a task to begin, memory would be idle. So
// the prefetching thread, a thread of the next warp, walks the same task list and prefetches
// weights of products of few rows to L2. It is at most ARK_MATRIX_AHEAD stages ahead of the loading
// thread, and prefetches only while the loading thread loads nothing. Its rate is one stage in the
// time in which memory could deliver ARK_MATRIX_PACE stages to each processor. At a higher rate,
// the few loads of tasks such as norms would wait behind the prefetches.

// Called by the prefetching thread: waits until the next stage should be prefetched, or the loading
// thread has loaded it. wanted: set to true in the first case. nanoseconds: the time in which
// memory delivers the stage. Returns false if the computing warps have left the loop.
ARK_DEVICE bool ark_matrix_due(ArkMatrixLoad& load, ark_u32 nanoseconds, bool& wanted) {
  ++load.walked;
  const ark_u32 clocks = ark_clocks(ARK_MATRIX_PACE * nanoseconds);
  for (;;) {
    const ark_u32 loaded = ark_shared_word(&ark_matrix.loaded), now = ark_clock();
    const ark_u32 ahead = load.walked - (loaded >> 8) & 0xffffffu;  // of the loading thread
    wanted = ahead - 1u < 0x800000u;
    if (!wanted) return true;
    if (loaded != load.loaded) {
      load.loaded = loaded;
      load.clock = now;
    }
    if (ahead <= ARK_MATRIX_AHEAD && now - load.clock >= clocks) {
      load.clock = now;
      return true;
    }
    if (ark_matrix_left()) return false;
    __nanosleep(50);
  }
}
ARK_DEVICE void ark_box_prefetch(ark_u64 map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}
ARK_DEVICE void ark_box_prefetch(ark_u64 map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
// The main function of the prefetching thread.
ARK_DEVICE void ark_matrix_prefetch_run(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkCtx& c = reinterpret_cast<ArkLoop*>(scratch)->ctx;
  const ArkPhases phases = ark_phases(p);
  ArkMatrixLoad load{};
  load.ahead = true;
  for (ark_u32 iteration = p->first; !load.stopped; ++iteration) {
    if (p->end != 0u && iteration == p->end) break;
    if (iteration != p->first && !ark_matrix_await(ark_matrix_place(iteration - 1u, 0u))) break;
    const ArkRange range = ark_range(p, processor, iteration, phases);
    for (ark_u32 at = range.task_begin; at < range.task_end && !load.stopped; ++at) {
      const ArkTask& task = ARK_POINTER(const ArkTask, p->tasks)[at];
      const bool grows = task.fetch_end != task.fetch_begin;
      if (!grows && (task.growth & ARK_LOADS_RIGHT) != 0u) ark_dispatch_load(c, task, load);
    }
  }
}
#endif

// Returns the lower word of the matrix descriptor by which wgmma finds an operand in shared memory.
// Operands have rows of 128 bytes, swizzled, in groups of eight rows. lead: the distance between
// blocks of 64 neighbouring elements, in units of 16 bytes. The upper word of all descriptors is
// ARK_MATRIX_ROWS.
#ifdef ARK_HAS_TENSOR_MEMORY
#define ARK_MATRIX_ROWS "0x40004040"
#else
#define ARK_MATRIX_ROWS "0x40000040"
#endif
ARK_DEVICE ark_u32 ark_matrix_operand(ark_u32 at, ark_u32 lead) { return at >> 4 | lead << 16; }
