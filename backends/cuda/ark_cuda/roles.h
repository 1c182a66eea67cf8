// The loop of the variant `roles` (docs/loop-kernel.md), which is used for decoding. One warp of a
// block, the lead warp, communicates: it waits for counters and signals them. The computing warps
// begin and end each task by a handshake with the lead warp, through two mbarriers. There is no
// barrier of the whole block between tasks.
//
// The lead warp waits until all computing warps have ended a task. It opens the next task when the
// first packet of that task's input has arrived. One lane polls for the packet, and only after this
// processor has ended all earlier tasks. Meanwhile the lead warp loads task records. Only the lead
// warp decides to leave the loop, so no warp waits at a barrier for warps that have left.

#define ARK_HAS_HANDSHAKE 1
#define ARK_HAS_LATER 1
constexpr int ARK_LATER = 8;  // words for the host whose stores wait for the iteration's end
constexpr int ARK_LEADS = ARK_BLOCK_WARPS - ARK_WARPS - 1;
static_assert(ARK_LEADS == 1, "one warp leads");
static_assert(ARK_RING_DEPTH % ARK_WARPS == 0, "a slot of the ring belongs to one warp");

struct ArkHandshake {
  // Four mbarriers. The lead warp arrives on `open` when a task may begin. Each computing warp
  // arrives on `done` when it has ended the task, on `gathered` when it has stored its part of the
  // task's input to shared memory, and on `squared` when it has stored its sum of squares.
  ark_u64 open, done, gathered, squared;
  ark_u32 quit;        // set before `open` completes: the computing warps leave the loop
  ark_u32 begin, end;  // the iteration's tasks, written before its first handshake
  // Arrays of ARK_WARPS words have one word for each computing warp, which only that warp writes.
  ark_u32 ended[ARK_WARPS];  // the number of handshakes that the warp has ended
  // Stores to the host that are delayed until the iteration's end: addresses (0: none) and words.
  ark_u64 later[ARK_LATER];
  ark_u32 posted[ARK_LATER];
  ark_u32 failed[ARK_WARPS];                       // one of the warp's waits has failed
  ark_u32 gathers[ARK_WARPS], squares[ARK_WARPS];  // its arrivals on `gathered` and `squared`
};

#define ark_handshake (ark_static_at<ArkHandshake, 512, 1024>())

// Initialises the handshake's barriers. Called by one thread when the kernel starts.
ARK_DEVICE void ark_handshake_init(const ArkParams* p, ark_u32 processor, char* scratch) {
  ark_open_loop(reinterpret_cast<ArkLoop*>(scratch)->ctx, p, processor, scratch);
  ark_barrier_init(&ark_handshake.open, 1u);
  ark_barrier_init(&ark_handshake.done, ARK_WARPS);
  ark_barrier_init(&ark_handshake.gathered, ARK_WARPS);
  ark_barrier_init(&ark_handshake.squared, ARK_WARPS);
  ark_handshake.quit = 0u;
  for (int i = 0; i < ARK_LATER; ++i) ark_handshake.later[i] = 0u;
  for (int w = 0; w < ARK_WARPS; ++w) {
    ark_handshake.ended[w] = ark_handshake.failed[w] = 0u;
    ark_handshake.gathers[w] = ark_handshake.squares[w] = 0u;
  }
}

// Waits for phase `count` of a barrier. This wait needs no time limit: a computing warp that waits
// inside of a task has a time limit there, and then arrives at this barrier too. All lanes of a
// warp call this function, so that each lane sees the other warps' writes.
ARK_DEVICE void ark_handshake_wait(ark_u64* barrier, ark_u32 count) {
  while (!ark_barrier_passed(barrier, count & 1u)) {
  }
}

// Called by a computing warp: waits until its next task may begin. Returns false if the warp must
// leave the loop. Code before this call may read only packets and data that no earlier task of the
// iteration writes.
ARK_DEVICE bool ark_enter(ArkCtx&) {
  ark_handshake_wait(&ark_handshake.open, ark_warp_load(&ark_handshake.ended[ark_warp()]));
  return *const_cast<volatile ark_u32*>(&ark_handshake.quit) == 0u;
}
// Called by a computing warp at the end of a task. The warp first writes everything that the lead
// warp reads about the task, then arrives at the barrier. After the arrival, the warp's word in the
// context is used for its next task.
ARK_DEVICE void ark_end_handshake(const ArkCtx& c) {
  ark_u32* ended = &ark_handshake.ended[ark_warp()];
  const ark_u32 next = ark_warp_load(ended) + 1u;
  if (ark_failed(c)) ark_warp_store(&ark_handshake.failed[ark_warp()], 1u);
  __syncwarp();
  ark_warp_store(ended, next);
  __syncwarp();
  if (ark_lane() == 0) ark_barrier_arrive(&ark_handshake.done, 1u);
}

// Called by each computing warp when it has stored its part of some data to shared memory. The
// returned value is passed to ark_handshake_wait, which returns when the parts of all warps are
// complete.
ARK_DEVICE ark_u32 ark_part_stored(ark_u64* barrier, ark_u32* counts) {
  const ark_u32 count = ark_warp_load(&counts[ark_warp()]);
  __syncwarp();
  ark_warp_store(&counts[ark_warp()], count + 1u);
  if (ark_lane() == 0) ark_barrier_arrive(barrier, 1u);
  return count;
}
// Called by a warp when it has stored its part of a task's input (ark_gather_stored) or its sum of
// squares (ark_squares_stored). A later call of ark_handshake_wait waits for the parts of all
// warps; in between, the warp does work that needs only its own part.
ARK_DEVICE ark_u32 ark_gather_stored() {
  return ark_part_stored(&ark_handshake.gathered, ark_handshake.gathers);
}
ARK_DEVICE void ark_gather_wait(ark_u32 count) {
  ark_handshake_wait(&ark_handshake.gathered, count);
}
ARK_DEVICE void ark_gathered() { ark_gather_wait(ark_gather_stored()); }
ARK_DEVICE ark_u32 ark_squares_stored() {
  return ark_part_stored(&ark_handshake.squared, ark_handshake.squares);
}
ARK_DEVICE void ark_squares_wait(ark_u32 count) {
  ark_handshake_wait(&ark_handshake.squared, count);
}

// Stores a word to the host's memory at the end of the iteration. Such a store delays every later
// release, so all processors would wait for the host. The lead warp therefore stores the word after
// it has signalled the iteration's last task. In persistent mode the word is stored at once,
// because the host may read it as soon as it sees that the iteration is done.
ARK_DEVICE void ark_post_later(ArkCtx& c, int place, ark_u32* p, ark_u32 v) {
  if (c.p->persistent != 0u || place >= ARK_LATER) return ark_post_host(p, v);
  ark_handshake.posted[place] = v;
  ark_handshake.later[place] = reinterpret_cast<ark_u64>(p);
}
ARK_DEVICE void ark_post_left() {
  if (ark_lane() >= ARK_LATER) return;
  const ark_u64 to = ark_handshake.later[ark_lane()];
  if (to == 0u) return;
  ark_post_host(reinterpret_cast<ark_u32*>(to), ark_handshake.posted[ark_lane()]);
  ark_handshake.later[ark_lane()] = 0u;
}

// Called by the lead warp: lets the computing warps begin the next task, or leave the loop if
// `quit`.
ARK_DEVICE void ark_open_handshake(bool quit) {
  if (quit && ark_lane() == 0) *const_cast<volatile ark_u32*>(&ark_handshake.quit) = 1u;
  __syncwarp();
  if (ark_lane() == 0) ark_barrier_arrive(&ark_handshake.open, 1u);
}
// Called by the lead warp: waits until all computing warps have ended the task. Returns false if
// any warp has failed in the task.
ARK_DEVICE bool ark_close_handshake(const ArkCtx& c, ark_u32& count) {
  ark_handshake_wait(&ark_handshake.done, count++);
  ark_copies_done();
  const int lane = ark_lane();
  const bool fine = !ark_failed(c) && (lane >= ARK_WARPS || ark_handshake.failed[lane] == 0u);
  return __all_sync(0xffffffffu, fine) != 0;
}

// Loads this thread's N pairs of elements. Pair i is loaded from at(i) if there(i) is true, and is
// zero otherwise. (NVRTC 13.0 loaded from a null pointer that marked a missing pair, on an H100, so
// `there` marks it.) Packets are loaded all at once, 16 bytes per load, and late packets are loaded
// again. All lanes of a warp leave the loop at the same time: lanes that left it separately did not
// converge at the end of the next loop.
template <int N, typename There, typename At>
ARK_DEVICE void ark_load_pairs(ArkCtx& c, const ark_u64*, const There& there, const At& at,
                               float (&v)[2 * N], bool system) {
  const ark_u32 epoch = c.iteration + 1u;
  ark_u64 seen[2 * N] = {};  // no epoch is 0
  const auto here = [&](int i) { return static_cast<ark_u32>(seen[i] >> 32) == epoch; };
  ArkSpin spin{0u, 0u};
  for (;;) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (there(i) && !(here(2 * i) && here(2 * i + 1))) {
        ark_packets_load(at(i), seen[2 * i], seen[2 * i + 1], system);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      all = all && (!there(i) || (here(2 * i) && here(2 * i + 1)));
    }
    if (__all_sync(0xffffffffu, all || ark_failed(c))) break;
    const ArkVerdict verdict = ark_spin(c.p, spin, c.p->budget_ns);
    if (__all_sync(0xffffffffu, verdict == ARK_KEEP)) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, 2u, 0u, epoch, static_cast<ark_u32>(seen[0] >> 32));
    ark_give_up(c);
  }
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) v[i] = ark_bits_float(static_cast<ark_u32>(seen[i]));
}
template <int N, typename T, typename There, typename At>
ARK_DEVICE void ark_load_pairs(ArkCtx&, const T*, const There& there, const At& at,
                               float (&v)[2 * N], bool) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[2 * i] = there(i) ? ark_get(at(i), 0) : 0.0f;
    v[2 * i + 1] = there(i) ? ark_get(at(i), 1) : 0.0f;
  }
}

// Called by the lead warp: waits for a task's input that arrives as packets, for which there is no
// counter. It polls one packet of the input. If the input is a sum of SHARES shares, SHARES lanes
// poll one packet of each share, because polling them in sequence would take one memory latency
// each. apart: the distance between two shares.
template <int SHARES = 1, typename T>
ARK_DEVICE void ark_poll_packet(ArkCtx& c, const T* packet, bool system, int apart = 0) {
  if constexpr (ark_packets<T>) {
    if (ark_lane() < SHARES) ark_wait_packet(c, packet + ark_lane() * apart, system);
    __syncwarp();
  }
}

ARK_DEVICE void ark_dispatch_poll(ArkCtx& c, const ArkTask& task);

ARK_DEVICE void ark_lead(const ArkParams* p, ark_u32 processor, char* scratch) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  const ArkTeam team{static_cast<ark_u32>(ark_lane()), 32u};
  const bool leader = ark_lane() == 0;
  const ArkPhases phases = ark_phases(p);
  ark_u32 stage_base = 0u, traced = 0u, handshakes = 0u;
  for (ark_u32 iteration = p->first;; ++iteration) {
    const ArkRange range = ark_range(p, processor, iteration, phases);
    const ark_u32 end = range.task_end;
    const ark_u32 limit = leader ? ark_known_limit(p) : 0u;
    if (range.task_begin < end) ark_task_ahead(team, loop, p, range.task_begin);
    if (range.task_begin + 1u < end) ark_task_ahead(team, loop, p, range.task_begin + 1u);
    ark_copies_done();
    __syncwarp();
    if (range.task_begin < end) ark_counter_ops_ahead(team, loop, p, range.task_begin);
    ark_copies_done();
    __syncwarp();
    bool go = true;
    if (leader) go = ark_may_begin(c, iteration, limit);
    if (!__shfl_sync(0xffffffffu, go, 0)) break;
    if (leader) {
      ark_open_iteration(c, iteration, phases, range, stage_base);
      *const_cast<volatile ark_u32*>(&ark_handshake.begin) = range.task_begin;
      *const_cast<volatile ark_u32*>(&ark_handshake.end) = end;
      ark_begin_growth(iteration);
    }
    ArkGrowing growing = {};
    // The first handshake of an iteration belongs to no task: it lets the computing warps begin the
    // iteration.
    ark_open_handshake(false);
    if (!ark_close_handshake(c, handshakes)) break;
    bool fine = true;
    for (ark_u32 i = range.task_begin; fine && i < end; ++i) {
      const ArkTask& task = loop.tasks[i % ARK_SLOTS];
      ark_warp_store(&c.warps[ark_warp()], i);
      const bool waits = task.wait_begin != task.wait_end;
      if (waits && !__all_sync(0xffffffffu, ark_wait_task(team, loop, i))) {
        fine = false;
        break;
      }
      ark_dispatch_poll(c, task);
      const ark_u64 begin = p->trace ? ark_time_ns() : 0u;
      ark_open_handshake(false);
      ark_count_growth(p, task, growing);
      if (i + 1u < end) ark_counter_ops_ahead(team, loop, p, i + 1u);
      if (i + 2u < end) ark_task_ahead(team, loop, p, i + 2u);
      fine = ark_close_handshake(c, handshakes);
      if (!fine) break;
      ark_signal_task(team, loop, i);
      if (p->trace && leader) ark_trace(c, task, traced, begin);
      __syncwarp();
    }
    if (!fine) break;
    stage_base = ark_next_stage(stage_base, range, growing.stages);
    ark_post_left();
  }
  ark_open_handshake(true);
}

// The main function of a computing warp.
ARK_DEVICE void ark_follow(char* scratch) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  while (ark_enter(c)) {
    const ark_u32 begin = *const_cast<volatile ark_u32*>(&ark_handshake.begin);
    const ark_u32 end = *const_cast<volatile ark_u32*>(&ark_handshake.end);
    ark_warp_store(&ark_ring.grown[ark_warp()], 0u);
    ark_end_handshake(c);
    for (ark_u32 i = begin; i < end; ++i) {
      ark_warp_store(&c.warps[ark_warp()], i);
      if (!ark_dispatch(c, loop.tasks[i % ARK_SLOTS])) return;
      ark_end_handshake(c);
    }
  }
}
