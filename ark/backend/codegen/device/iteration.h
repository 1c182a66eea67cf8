// The code between iterations: it decides whether the next iteration may begin, and finds its phase
// and its task list.

// Ends the loop at the host's request: no processor begins another iteration, and every wait gives
// up. If ArkControl::go is 0x40000000 or more, processors leave instead of waiting for permission.
ARK_COLD void ark_leave(ArkCtx& c) {
  ArkControl* control = ark_control(ARK_GIVEN_PARAMS(ARK_GIVEN(c).p));
  ark_post_host(&control->limit, 0u);  // other processors read it meanwhile
  ark_add_release(&control->abort, 1u, false);
  ark_add_release(&control->go, 0x40000000u, false);
}

// True for the iterations whose completion is reported to the host during a launch: those whose
// number is a power of two or a multiple of 64.
ARK_DEVICE bool ark_told(ark_u32 iteration) {
  return iteration % 64u == 0u || (iteration & (iteration - 1u)) == 0u;
}

// Lowers the number of iterations of this launch. All processors see the new limit when they have
// passed the next iteration barrier. If no task calls this function, the limit cannot fall during a
// launch, and each processor loads the limit early, while it waits for the barrier.
// (ark.backend.codegen.writer searches the source for the function's name.)
ARK_DEVICE void ark_lower_limit(const ArkCtx& c, ark_u32 iterations) {
  ark_post_host(&ark_control(ARK_PARAMS(c))->limit, iterations);
}

// True if processor 0 should now read whether the host wants the launch to end. It reads this once
// per iteration; if reading host memory is slow, at most once per ARK_ASK_NS nanoseconds.
#define ARK_ASK_NS 50000u
ARK_DEVICE bool ark_ask(ArkCtx& c) {
  if (c.processor != 0u) return false;
  if (ARK_HOST_CHECK == 0u) return true;
  const ark_u32 now = static_cast<ark_u32>(ark_time_ns());
  if (now - c.asked < ARK_ASK_NS) return false;
  c.asked = now;
  return true;
}

// The number of iterations of this launch, as it is now. It is loaded early, at the same time as
// other data, and may have fallen since. The number can only fall, so if it excludes an iteration,
// that iteration will not run.
ARK_DEVICE ark_u32 ark_known_limit(const ArkParams* p) {
  return ark_peek_host(&ark_control(p)->limit);
}

// Called by the leader (one thread per processor): waits until this processor may begin the
// iteration. Returns false if the processor must leave the loop.
//
// The barrier opens when the preceding iteration is complete: on all ranks if they begin iterations
// together, otherwise on this rank. Processor 0 also reads whether the host wants to end the
// launch. It issues this load before it waits for the barrier, so that the two latencies overlap.
// In persistent mode processor 0 also waits until the host allows the iteration.
//
// The last processor often has the least work, so it reports completed iterations to the host. It
// reports only the end and some iterations (ark_told), because a store to host memory can delay
// iterations of a few microseconds. In persistent mode it reports every iteration, because the host
// may read results before the launch ends.
//
// limit: the result of an earlier call of ark_known_limit.
ARK_DEVICE bool ark_may_begin(ArkCtx& c, ark_u32 iteration, ark_u32 limit) {
  const bool tells = c.processor + 1u == ARK_PARAMS(c)->processors;
  const bool over = ARK_PARAMS(c)->end != 0u && iteration == ARK_PARAMS(c)->end;
  const bool persistent = ARK_PARAMS(c)->persistent != 0u;
#if defined(ARK_LIMIT_FALLS)
  const bool none = over || (!persistent && iteration >= limit);
#else
  const bool none = over;
#endif
  if (none && !tells) return false;
  ArkControl* control = ark_control(ARK_PARAMS(c));
  const ark_u32 leave = ark_ask(c) ? ark_peek_host(&ark_host(ARK_PARAMS(c))->abort) : 0u;
  const bool system = ARK_PARAMS(c)->peers != 0u;
  // On a single rank the first iteration of a launch need not wait: all earlier work was complete
  // when the launch began.
  const bool first = iteration == ARK_PARAMS(c)->first && !system;
  const ark_u32 want = iteration * ARK_PARAMS(c)->barrier_step;
  // This wait has a longer time limit than the waits of tasks. So if a processor waits in vain in a
  // task, its error is reported, and not that of a processor that waits here for the next
  // iteration.
  const ark_u64 budget = ARK_PARAMS(c)->budget_ns / 4u * 5u;
  const ark_u32* barrier = ark_words(ARK_PARAMS(c)->barrier);
  if (!first && !ark_wait<ARK_SIGNAL_WORDS>(c, barrier, want, system, 4u, 0u, budget)) return false;
#if defined(ARK_LIMIT_FALLS)
  // A task of the preceding iteration may have lowered the limit, so it is read again.
  if (!first && !none && !persistent) limit = ark_peek_host(&control->limit);
#endif
  const bool more = !over && (persistent || iteration < limit);
  if (tells && iteration != 0u && (persistent || !more || ark_told(iteration))) {
    ark_u32* done = &ark_host(ARK_PARAMS(c))->done;
    // An earlier kernel of the same launch may have lowered the limit below the first iteration of
    // this kernel. Then `limit` iterations have been completed. If the limit is 0, ark_leave has
    // set it to end the loop, and it is not the number of completed iterations.
    const bool before = !persistent && !over && limit != 0u && limit < iteration;
    persistent ? ark_store_host(done, iteration) : ark_post_host(done, before ? limit : iteration);
  }
  if (!more) return false;
  if (leave != 0u) {
    ark_leave(c);
    return false;
  }
  if (!persistent) return true;
  if (c.processor == 0u) {
    ArkHost* host = ark_host(ARK_PARAMS(c));
    ArkSpin spin{0u, 0u};
    for (;;) {
      const ark_u32 target = ark_load_host(&host->target);
      if (target > iteration) {
        ark_add_release(&control->go, 1u, false);
        break;
      }
      const bool quit = (ark_load_host(&host->quit) | ark_peek_host(&host->abort)) != 0u;
      if (quit || ark_spin(ARK_PARAMS(c), spin, ARK_PARAMS(c)->idle_ns) != ARK_KEEP) {
        ark_add_release(&control->go, 0x40000000u, false);
        ark_store_host(&host->quit, 1u);
        return false;
      }
    }
    return true;
  }
  // In persistent mode the host may allow no iteration for a long time, so this wait has no time
  // limit. It ends when processor 0 allows the iteration or gives up.
  ArkSpin spin{0u, 0u};
  for (;;) {
    const ark_u32 go = ark_load_acquire(&control->go, false);
    if (go >= 0x40000000u) return false;
    if (go > iteration) return true;
    const ark_u64 patience = ARK_PARAMS(c)->idle_ns + ARK_PARAMS(c)->budget_ns;
    if (ark_spin(ARK_PARAMS(c), spin, patience) != ARK_KEEP) return false;
  }
}

// Called by one thread before the first iteration: initialises the fields of ArkCtx that task
// bodies read. (ark_open_iteration updates them before each iteration.)
ARK_DEVICE void ark_open_loop(ArkCtx& c, const ArkParams* p, ark_u32 processor, char* scratch) {
  c.p = p;
  c.scratch = scratch + ARK_LOOP_BYTES;
  c.processor = processor;
  c.iteration = 0u;
  c.asked = 0u;
  for (int w = 0; w < ARK_BLOCK_WARPS; ++w) c.warps[w] = ARK_NO_TASK;
}
// For each phase except the last, the number of the iteration at which it ends. The host writes
// these numbers after ArkControl in memory. The last phase ends with the launch.
struct ArkPhases {
  ark_u32 end[ARK_PHASES];
};
ARK_DEVICE ArkPhases ark_phases(const ArkParams* p) {
  ArkPhases phases = {};
  const ark_u32* ends = reinterpret_cast<const ark_u32*>(ark_control(p) + 1);
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) phases.end[i] = ends[i];
  return phases;
}
ARK_DEVICE ark_u32 ark_phase(const ArkPhases& phases, ark_u32 iteration) {
  ark_u32 phase = 0u;
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) phase += iteration >= phases.end[i] ? 1u : 0u;
  return phase;
}
// The number of an iteration counted from the start of its phase.
ARK_DEVICE ark_u32 ark_phase_iteration(const ArkPhases& phases, ark_u32 iteration) {
  const ark_u32 phase = ark_phase(phases, iteration);
  ark_u32 begun = 0u;
  for (ark_u32 i = 0u; i + 1u < ARK_PHASES; ++i) {
    if (i + 1u == phase) begun = phases.end[i];
  }
  return iteration - begun;
}
ARK_DEVICE void ark_open_iteration(ArkCtx& c, ark_u32 iteration, const ArkPhases& phases,
                                   const ArkRange& range, ark_u32 stage_base) {
  c.iteration = iteration;
  c.phase = ark_phase(phases, iteration);
  c.phase_iteration = ark_phase_iteration(phases, iteration);
  c.task_end = range.task_end;
  c.fetches = ARK_POINTER(const ArkFetch, ARK_PARAMS(c)->fetches) + range.fetch_begin;
  c.stage_base = stage_base;
}
ARK_DEVICE const ArkRange& ark_range(const ArkParams* p, ark_u32 processor, ark_u32 iteration,
                                     const ArkPhases& phases) {
  const ark_u32 first = ark_phase(phases, iteration) * p->processors;
  return ARK_POINTER(const ArkRange, p->ranges)[first + processor];
}
// Returns the number of the first stage of the next iteration. stage_base: the number of the first
// stage of this iteration. In `range`, a fetch of a growing operand (KV cache) counts as one stage.
// grown: the number of further stages that such fetches have taken.
ARK_DEVICE ark_u32 ark_next_stage(ark_u32 stage_base, const ArkRange& range, ark_u32 grown = 0u) {
  stage_base += range.fetch_end - range.fetch_begin + grown;
  return stage_base >= ARK_STAGE_PERIOD ? stage_base - ARK_STAGE_PERIOD : stage_base;
}
