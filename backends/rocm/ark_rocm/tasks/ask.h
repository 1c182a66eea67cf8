// While a block waits for packets, one of its waves prefetches weights of the processor's next
// tasks: it loads a dword of each cache line, which brings the line into the die's second-level
// cache and into the memory-side cache. Tasks still read the weights in place, so none depends on
// the prefetch.

constexpr int ARK_ASKED = 48;          // loads of a wave, one line per lane: 384 KB
constexpr int ARK_ASKED_TOGETHER = 2;  // loads between two polls
constexpr ark_u32 ARK_ASKED_TASKS = 3u;

// Polls a packet until it has arrived or all weights are requested. The first `patience` polls
// request nothing. A poll returns after the loads that were requested before it, so few loads are
// in flight at a time and urgent reads do not queue behind them.
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
    const ArkTask& next = tasks[running + ahead];
    if (next.fetch_begin == next.fetch_end) continue;
    const ArkFetch& fetch = ark_fetch(c, next.fetch_begin);
    if (fetch.form != 0u) continue;  // not of plain, contiguous stages
    const auto* from = (const ark_global<char>*)fetch.address;
    const int lines = static_cast<int>((next.fetch_end - next.fetch_begin) * fetch.bytes / 128u);
#pragma unroll 1
    for (int line = ark_lane(); line - ark_lane() < lines; line += ARK_ASKED_TOGETHER * ARK_LANES) {
      ark_u32 word[ARK_ASKED_TOGETHER];
#pragma unroll
      for (int i = 0; i < ARK_ASKED_TOGETHER; ++i) {
        const int at = line + i * ARK_LANES;
        word[i] = *(const ark_global<ark_u32>*)(from + (at < lines ? at : lines - 1) * 128);
      }
      const bool ready = ark_packet_ready(c, ark_packet_load(packet, system));
#pragma unroll
      for (int i = 0; i < ARK_ASKED_TOGETHER; ++i) asm volatile("" ::"v"(word[i]));
      asked += ARK_ASKED_TOGETHER;
      if (ready || asked >= ARK_ASKED) return;
    }
  }
}
