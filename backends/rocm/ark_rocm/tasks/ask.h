// Prefetches weights while a block waits for packets. One wave of the block loads a dword of each
// cache line of the weights of the processor's next tasks. This brings the lines into the die's L2
// and into the memory-side cache. Tasks still read the weights in place, so no task depends on the
// prefetch.

constexpr int ARK_ASKED = 48;          // loads of a wave, one line per lane: 384 KB
constexpr int ARK_ASKED_TOGETHER = 2;  // loads between two polls
constexpr ark_u32 ARK_ASKED_TASKS = 3u;

// The cache lines of a task's weights. Empty if the task's descriptors of reads (ArkFetch) do not
// describe one contiguous range.
ARK_DEVICE ArkLines ark_lines(ArkCtx& c, const ArkTask& task) {
  if (task.fetch_begin == task.fetch_end) return {nullptr, 0};
  const ArkFetch& fetch = ark_fetch(c, task.fetch_begin);
  const ark_u32 bytes = (task.fetch_end - task.fetch_begin) * fetch.bytes;
  const int lines = static_cast<int>(bytes / 128u);
  return {(const ark_global<char>*)fetch.address, fetch.form == 0u ? lines : 0};
}

// The cache lines of the weights of the processor's next task. If it has none, one line of `other`.
ARK_DEVICE ArkLines ark_next_lines(ArkCtx& c, const unsigned char* other) {
  const ArkLoop& loop = *reinterpret_cast<const ArkLoop*>(ARK_SCRATCH(c) - ARK_LOOP_BYTES);
  const ark_u32 next = (ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP) + 1u;
  ArkLines lines{nullptr, 0};
  if (next < c.task_end) lines = ark_lines(c, loop.tasks[next % ARK_SLOTS]);
  return lines.count > 0 ? lines : ArkLines{(const ark_global<char>*)other, 1};
}

// How many cache lines of the next task's weights the last ark_poll_asking has prefetched. Waves
// may read this at any time: too small a number only prefetches lines again.
ARK_DEVICE int ark_asked_of_next(ArkCtx& c) {
  const ark_u32 next = (ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP) + 1u;
  const ark_u64 until =
      __hip_atomic_load(&ark_asked_until, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  return static_cast<ark_u32>(until >> 32) == next ? static_cast<int>(until) : 0;
}

// Polls a packet and prefetches between the polls, until the packet has arrived or ARK_ASKED lines
// per lane were prefetched. The first `patience` polls prefetch nothing. Loads return in order, so
// a poll returns only after all earlier prefetches have returned. Therefore only a few prefetches
// are in flight at a time, and they delay other waves' reads only a little.
ARK_DEVICE void ark_poll_asking(ArkCtx& c, const ark_u64* packet, bool system, int patience) {
  const ark_u32 running = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
  const auto* tasks = ARK_POINTER(const ArkTask, ARK_PARAMS(c)->tasks);
  int asked = 0;
  for (int poll = 0; poll < patience; ++poll) {
    if (ark_packet_ready(c, ark_packet_load(packet, system))) return;
    ark_pause(0u);
  }
#pragma unroll 1
  for (ark_u32 ahead = 1u; ahead <= ARK_ASKED_TASKS; ++ahead) {
    if (running + ahead >= c.task_end) return;
    const ArkLines lines = ark_lines(c, tasks[running + ahead]);
#pragma unroll 1
    for (int line = ark_lane(); line - ark_lane() < lines.count;
         line += ARK_ASKED_TOGETHER * ARK_LANES) {
      ark_u32 word[ARK_ASKED_TOGETHER];
#pragma unroll
      for (int i = 0; i < ARK_ASKED_TOGETHER; ++i) {
        word[i] = lines.load(line + i * ARK_LANES);
      }
      const bool ready = ark_packet_ready(c, ark_packet_load(packet, system));
#pragma unroll
      for (int i = 0; i < ARK_ASKED_TOGETHER; ++i) asm volatile("" ::"v"(word[i]));
      asked += ARK_ASKED_TOGETHER;
      const ark_u32 done = static_cast<ark_u32>(line - ark_lane() + ARK_ASKED_TOGETHER * ARK_LANES);
      __hip_atomic_store(&ark_asked_until, static_cast<ark_u64>(running + ahead) << 32 | done,
                         __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
      if (ready || asked >= ARK_ASKED) return;
    }
  }
}
