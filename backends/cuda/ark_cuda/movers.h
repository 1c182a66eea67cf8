// The moving warps of the variant `matrix`: the three other warps of the loading thread's
// warpgroup. They run a separate task list of copies and sums between ranks (ark_cuda.tasks.moves).
// They limit the rate of their stores to peers, so that these do not delay the loads of the
// multiplying warps. Like the loading thread, they call no function. They begin and leave
// iterations after the computing warps of their block.

static_assert(ARK_PHASES == 1 && ARK_SIGNAL_WORDS == 1, "plans with such lists have one phase");
constexpr int ARK_MOVE_FIRST = 32 * (ARK_WARPS + 1);
constexpr int ARK_MOVE_THREADS = 32 * ARK_BLOCK_WARPS - ARK_MOVE_FIRST;
constexpr ark_u32 ARK_MOVE_SPINS = 256u;  // polls between two checks of clock and abort word

struct ArkMovers {
  ArkCtx ctx;
  ark_u32 opened;  // iterations that the computing warps have begun; polled, by atomics
};
#define ark_movers (ark_static_at<ArkMovers, 512, 768>())

ARK_DEVICE int ark_move_thread() { return static_cast<int>(threadIdx.x) - ARK_MOVE_FIRST; }
ARK_DEVICE bool ark_move_all(bool v) {
  __syncwarp();
  ark_u32 all;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n"
      " barrier.red.and.pred q, 15, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(static_cast<ark_u32>(v)), "n"(ARK_MOVE_THREADS)
      : "memory");
  return all != 0u;
}

// Initialises the moving warps' state. Called by one thread before the block's warps take their
// roles.
ARK_DEVICE void ark_movers_open(const ArkParams* p) {
  ark_open_loop(ark_movers.ctx, p, p->processors + blockIdx.x, ark_shared);
  ark_movers.opened = p->first;
}
// Allows the moving warps to begin the iteration. Called by one of the computing threads.
ARK_DEVICE void ark_movers_begin(ark_u32 iteration) {
  atomicExch(&ark_movers.opened, iteration + 1u);
}
ARK_DEVICE bool ark_movers_may_begin(ark_u32 iteration) {
  for (;;) {
    const bool left = ark_matrix_left();
    if (static_cast<ark_i32>(atomicAdd(&ark_movers.opened, 0u) - iteration) > 0) return true;
    if (left) return false;
    __nanosleep(100);
  }
}

// Called by one thread: waits for a counter, within the launch's time limit, and checks the abort
// word.
ARK_DEVICE bool ark_move_wait(const ArkCtx& c, ark_u32 at, const ArkCounterOp& e) {
  const ArkParams* p = ARK_PARAMS(c);
  const ark_u32 want = e.step * c.iteration + e.value;
  const bool system = (e.flags & 1u) != 0u;
  ark_u64 start = 0u;
  for (ark_u32 spins = 1u;; ++spins) {
    const ark_u32 seen = ark_load_acquire(ark_words(e.address), system);
    if (static_cast<ark_i32>(seen - want) >= 0) return true;
    __nanosleep(100);
    if (spins % ARK_MOVE_SPINS != 0u) continue;
    if (ark_load_acquire(&ark_control(p)->abort, false) != 0u) return false;
    const ark_u64 now = ark_time_ns();
    if (start == 0u) start = now;
    if (now - start <= p->budget_ns) continue;
    ark_report(c, at, 1u, e.counter, want, seen);
    return false;
  }
}

ARK_DEVICE void ark_dispatch_move(const ArkTask& t);

ARK_DEVICE void ark_move_run(const ArkParams* p) {
  ArkCtx& c = ark_movers.ctx;
  const ark_u32 thread = static_cast<ark_u32>(ark_move_thread());
  const ArkRange& range = ARK_POINTER(const ArkRange, p->ranges)[p->processors + blockIdx.x];
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, p->counter_ops);
  ark_u32 traced = 0u;
  for (ark_u32 iteration = p->first;; ++iteration) {
    if (!ark_move_all(thread != 0u || ark_movers_may_begin(iteration))) return;
    if (thread == 0u) c.iteration = iteration;
    ark_move_all(true);
    for (ark_u32 at = range.task_begin; at < range.task_end; ++at) {
      const ArkTask& task = ARK_POINTER(const ArkTask, p->tasks)[at];
      bool go = true;
      for (ark_u32 w = task.wait_begin + thread; w < task.wait_end; w += ARK_MOVE_THREADS) {
        go = go && ark_move_wait(c, at, ops[w]);
      }
      if (!ark_move_all(go)) return;
      const ark_u64 begin = p->trace != 0u ? ark_time_ns() : 0u;
      ark_dispatch_move(task);
      ark_move_all(true);
      for (ark_u32 s = task.wait_end + thread; s < task.signal_end; s += ARK_MOVE_THREADS) {
        ark_signal(c, ops[s]);
      }
      if (p->trace != 0u && thread == 0u) ark_trace(c, task, traced, begin);
    }
  }
}
