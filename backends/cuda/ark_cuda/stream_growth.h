// The part of the operand stream (stream.h) for fetches that grow: rows of caches (keys and
// values), whose number is known only at run time. Only kernels with such fetches include this
// file.

#define ARK_HAS_GROWTH 1

// Broadcasts lane `lane`'s record of a growing fetch to all lanes of the warp.
ARK_DEVICE ArkGrowth ark_from_lane(const ArkGrowth& g, ark_u32 lane) {
  ArkGrowth made;
  made.address = __shfl_sync(0xffffffffu, g.address, lane);
  made.beside = __shfl_sync(0xffffffffu, g.beside, lane);
  made.length = __shfl_sync(0xffffffffu, g.length, lane);
  made.row = __shfl_sync(0xffffffffu, g.row, lane);
  made.rows = __shfl_sync(0xffffffffu, g.rows, lane);
  made.step = __shfl_sync(0xffffffffu, g.step, lane);
  made.part = __shfl_sync(0xffffffffu, g.part, lane);
  made.parts = __shfl_sync(0xffffffffu, g.parts, lane);
  made.window = __shfl_sync(0xffffffffu, g.window, lane);
  made.table = 0u;
  made.page = made.pitch = made.pages = 0u;
  if (ARK_STREAM_PAGES) {
    made.table = __shfl_sync(0xffffffffu, g.table, lane);
    made.page = __shfl_sync(0xffffffffu, g.page, lane);
    made.pitch = __shfl_sync(0xffffffffu, g.pitch, lane);
    made.pages = __shfl_sync(0xffffffffu, g.pages, lane);
  }
  return made;
}
// Waits until the computing warps allow the iteration to begin. Copies then see all writes of
// earlier iterations. Returns false if the computing warps have left the loop. The wait needs no
// time limit, because the waits of the computing warps have one.
ARK_DEVICE bool ark_stream_begun(const ArkCtx& c) {
  bool begun = true;
  if (ark_lane() == 0) {
    while (begun && static_cast<ark_i32>(atomicAdd(&ark_ring.begun, 0u) - (c.iteration + 1u)) < 0) {
      begun = !ark_left();
      __nanosleep(20);
    }
    __threadfence();
  }
  if (!__shfl_sync(0xffffffffu, begun, 0)) return false;
  __syncwarp();
  asm volatile("fence.proxy.async;" ::: "memory");
  return true;
}
// The page numbers of rows first to end - 1 of a cache in pages: lane l returns the number of the
// l-th page that contains such rows. A number outside of the page pool is replaced by page 0; the
// task's body checks the numbers too and ends the run.
ARK_DEVICE ark_u32 ark_stream_page(const ArkGrowth& g, ark_u32 first, ark_u32 end) {
  const ark_u32 page = first / g.page + static_cast<ark_u32>(ark_lane());
  if (page * g.page >= end) return 0u;
  const ark_u32 number = reinterpret_cast<const volatile ark_u32*>(g.table)[page];
  return number < g.pages ? number : 0u;
}
ARK_DEVICE void ark_fill_pages(const ArkRingAt& at, const ArkGrowth& g, ark_u32 slot, ark_u32 first,
                               ark_u32 end, ark_u32 number) {
  const ark_u32 top = (first / g.page + static_cast<ark_u32>(ark_lane())) * g.page;
  const ark_u32 begin = top < first ? first : top, last = top + g.page < end ? top + g.page : end;
  if (begin >= last) return;
  const ark_u64 from =
      static_cast<ark_u64>(number) * g.pitch + static_cast<ark_u64>(begin - top) * g.row;
  const ark_u32 to = at.slots + slot * ARK_STAGE_BYTES + (begin - first) * g.row;
  const ark_u32 bytes = (last - begin) * g.row, full = at.full + slot * 8u;
  ark_bulk_copy(to, g.address + from, bytes, full, ARK_STREAM_POLICY);
  ark_bulk_copy(to + g.step * g.row, g.beside + from, bytes, full, ARK_STREAM_POLICY);
}
// Loads the stages of a growing fetch. Each stage has rows of two operands (keys and values) that
// were written before this iteration. Each row is read only once in an iteration, and packets have
// priority over it, as over weights. length: the number of rows that earlier iterations wrote.
ARK_DEVICE bool ark_stream_growth(ArkCtx& c, const ArkRingAt& at, const ArkGrowth& g,
                                  ark_u32 length, ark_u32& issued) {
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts, g.window);
  for (ark_u32 first = rows.begin; first < rows.end; first += g.step) {
    const ark_u32 slot = issued % ARK_RING_DEPTH;
    const ark_u32 end = rows.end < rows.newest ? rows.end : rows.newest;
    const ark_u32 left = first < end ? end - first : 0u;
    const ark_u32 count = left < g.step ? left : g.step, bytes = count * g.row;
    const bool paged = ARK_STREAM_PAGES && g.page != 0u;
    const ark_u32 number = paged ? ark_stream_page(g, first, first + count) : 0u;
    if (!ark_slot_free(at, slot, issued / ARK_RING_DEPTH)) return false;
    if (!ark_prepare_slot(c, at, slot, g.address, 2u * bytes)) return false;
    if (!ark_stream_landed(c, at, issued, ARK_IN_FLIGHT)) return false;
    if (paged) {
      ark_fill_pages(at, g, slot, first, first + count, number);
    } else if (ark_lane() == 0 && bytes != 0u) {
      const ark_u64 from = static_cast<ark_u64>(first) * g.row;
      const ark_u32 to = at.slots + slot * ARK_STAGE_BYTES, full = at.full + slot * 8u;
      ark_bulk_copy(to, g.address + from, bytes, full, ARK_STREAM_POLICY);
      ark_bulk_copy(to + g.step * g.row, g.beside + from, bytes, full, ARK_STREAM_POLICY);
    }
    if (++issued == 2u * ARK_STAGE_PERIOD) issued = ARK_STAGE_PERIOD;
  }
  return true;
}

// Called by each computing warp at the end of a task whose growing fetch had `stages` stages. The
// plan's stage numbers count such a fetch as one stage, so `stages` - 1 is added to the warp's
// count of additional stages.
ARK_DEVICE void ark_stages_grown(ark_u32 stages) {
  ark_u32* mine = &ark_ring.grown[ark_warp()];
  const ark_u32 before = ark_warp_load(mine);
  __syncwarp();
  ark_warp_store(mine, before + stages - 1u);
  __syncwarp();
}

ARK_DEVICE ark_u32 ark_grown_stages(const ArkGrowth& g, ark_u32 length) {
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts, g.window);
  return (rows.end - rows.begin + g.step - 1u) / g.step;
}
// Counts the additional stages of growing fetches (KV caches) in an iteration: a task's stage
// numbers count such a fetch as one stage, however many stages it has. The lead warp counts them
// while a task runs.
struct ArkGrowing {
  ark_u64 lengths;  // the address from which `length` was loaded
  ark_u32 length;
  ark_u32 stages;  // of this iteration's tasks so far
};
ARK_DEVICE void ark_count_growth(const ArkParams* p, const ArkTask& task, ArkGrowing& growing) {
  if (task.growth == 0u) return;
  const ArkGrowth& g = ARK_POINTER(const ArkGrowth, p->growths)[task.growth - 1u];
  if (g.length != growing.lengths) {
    growing.lengths = g.length;
    growing.length = *ARK_POINTER(const ark_u32, g.length);
  }
  growing.stages += ark_grown_stages(g, growing.length) - 1u;
}
// Called by one lane of the lead warp: lets the loading warp copy rows of growing fetches in this
// iteration. Data that this lane has acquired is visible to the loading warp, too.
ARK_DEVICE void ark_begin_growth(ark_u32 iteration) {
  __threadfence();
  atomicExch(&ark_ring.begun, iteration + 1u);
}
