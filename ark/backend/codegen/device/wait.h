// The part of the loop's state that task bodies see, and all waits for memory. Every wait has a
// time limit and checks the abort word; the first failure of a launch is recorded for the host.

// Converts an address of device memory to a pointer. A backend may define a pointer type that
// excludes shared memory, for which its compiler emits faster instructions.
#if !defined(ARK_POINTER)
#define ARK_POINTER(type, address) reinterpret_cast<type*>(address)
#endif
// Copies a structure from device memory. It is used in functions that, in another branch, read the
// same structure from shared memory. A backend with separate instructions for the two memories
// defines its own version.
#if !defined(ARK_DEVICE_COPY)
#define ARK_DEVICE_COPY(type, address) (*ARK_POINTER(const type, address))
#endif

// Stage numbers start again from 0 at this number, so that 32 bits suffice for any number of
// iterations. It is a multiple of the number of slots of any ring, of the period of their barriers'
// phases, and of the number of warps, so that a stage's slot, phase and warp continue as before.
constexpr ark_u32 ARK_STAGE_UNIT =
    2u * ARK_WARPS * (ARK_RING_BYTES > 0 ? ARK_RING_BYTES / ARK_STAGE_BYTES : 1);
constexpr ark_u32 ARK_STAGE_PERIOD = (1u << 30) / ARK_STAGE_UNIT * ARK_STAGE_UNIT;

// Values in ArkCtx::warps, which has a word for each warp. The word is the index of the warp's
// running task in the task table. Its highest bit is set if a wait inside the body has given up.
// Only the warp itself accesses its word. Other warps learn of a failure from the abort word and
// from the vote at the task's end.
constexpr ark_u32 ARK_NO_TASK = 0x7fffffffu;
constexpr ark_u32 ARK_GAVE_UP = 0x80000000u;

// The context that a task body receives besides its task. Each processor has one, in its shared
// memory.
struct ArkCtx {
  const ArkParams* p;
  char* scratch;            // shared memory of this processor, ARK_SCRATCH_BYTES
  const ArkFetch* fetches;  // this processor's operand stream in this phase
  ark_u32 processor;
  ark_u32 iteration;  // its number since the launch
  ark_u32 phase;
  ark_u32 phase_iteration;         // its number since the phase began
  ark_u32 task_end;                // the end of this processor's list in this phase
  ark_u32 stage_base;              // stages consumed in earlier iterations, up to ARK_STAGE_PERIOD
  ark_u32 warps[ARK_BLOCK_WARPS];  // the words of the warps of all roles
  ark_u32 asked;                   // when the host's request to leave was last read, in ns
};

// The addresses of scratch memory and of the parameters. A backend on which these addresses are
// constants defines macros that need no load from the context.
#if !defined(ARK_SCRATCH)
#define ARK_SCRATCH(ctx) ((ctx).scratch)
#define ARK_PARAMS(ctx) ((ctx).p)
#endif
// The context and the parameters as arguments of functions that are called rather than inlined
// (ARK_COLD). In such functions a backend's compiler may know less about their addresses, so the
// backend may pass them in another form.
#if !defined(ARK_GIVEN)
#define ARK_GIVEN(ctx) (ctx)
#define ARK_GIVEN_PARAMS(p) (p)
#endif
// True if function calls are expensive on this backend: a call waits for all loads in flight, and a
// function that calls others needs a stack. Then functions for rare cases (ARK_COLD) call no
// further functions, and a wait polls once inline before it calls a function.
#if !defined(ARK_CALLS_WAIT)
#define ARK_CALLS_WAIT false
#endif

ARK_DEVICE bool ark_failed(const ArkCtx& c) {
  return (ark_warp_load(&c.warps[ark_warp()]) & ARK_GAVE_UP) != 0u;
}
ARK_DEVICE void ark_give_up(ArkCtx& c) {
  ark_u32* mine = &c.warps[ark_warp()];
  ark_warp_store(mine, ark_warp_load(mine) | ARK_GAVE_UP);
}

ARK_DEVICE const ArkFetch& ark_fetch(const ArkCtx& c, ark_u32 stage) {
  return ARK_POINTER(const ArkFetch, reinterpret_cast<ark_u64>(c.fetches))[stage];
}

ARK_DEVICE ark_u32* ark_words(ark_u64 address) { return ARK_POINTER(ark_u32, address); }

ARK_DEVICE ArkControl* ark_control(const ArkParams* p) {
  return ARK_POINTER(ArkControl, p->control);
}

ARK_DEVICE ArkHost* ark_host(const ArkParams* p) { return ARK_POINTER(ArkHost, p->host); }

// Records a failure for the host if it is the launch's first, and sets the abort word, which all
// processors read. at: the index of the running task in the task table. why: the kind of failure.
ARK_DEVICE void ark_report(const ArkCtx& c, ark_u32 at, ark_u32 why, ark_u32 counter,
                           ark_u32 expected, ark_u32 seen) {
  ArkControl* control = ark_control(ARK_GIVEN_PARAMS(c.p));
  if (ark_cas(&control->error, 0u, why) == 0u) {
    ArkHost* host = ark_host(ARK_GIVEN_PARAMS(c.p));
    const ArkTask* task = ARK_POINTER(const ArkTask, ARK_GIVEN_PARAMS(c.p)->tasks) + at;
    host->error_task = at == ARK_NO_TASK ? 0xffffffffu : task->index;
    host->error_op = at == ARK_NO_TASK ? 0xffffffffu : task->op;
    host->error_counter = counter;
    host->error_expected = expected;
    host->error_seen = seen;
    host->error_processor = c.processor;
    host->error_iteration = c.iteration;
    ark_store_host(&host->error, why);
  }
  ark_add_release(&control->abort, 1u, false);
}
ARK_DEVICE void ark_fail_here(ArkCtx& c, ark_u32 why, ark_u32 counter, ark_u32 expected,
                              ark_u32 seen) {
  const ark_u32 at = ark_warp_load(&c.warps[ark_warp()]) & ~ARK_GAVE_UP;
  ark_report(c, at, why, counter, expected, seen);
  ark_give_up(c);
}
ARK_COLD void ark_fail(ArkCtx& c, ark_u32 why, ark_u32 counter, ark_u32 expected, ark_u32 seen) {
  ark_fail_here(ARK_GIVEN(c), why, counter, expected, seen);
}

// A bit mask that limits reads of host memory during a wait: the host's abort word is read once in
// this many polls (+ 1), because such reads are slow and delay other processors too. A backend
// whose host memory is near defines 0.
#if !defined(ARK_HOST_CHECK)
#define ARK_HOST_CHECK 0xffffu
#endif

ARK_DEVICE bool ark_aborted(const ArkParams* p, bool ask_host) {
  if (ark_load_acquire(&ark_control(p)->abort, false) != 0u) return true;
  if (!ask_host || ark_peek_host(&ark_host(p)->abort) == 0u) return false;
  ark_add_release(&ark_control(p)->abort, 1u, false);
  return true;
}

// The state of a wait with a time limit. Call ark_spin once after each failed poll; any result
// except ARK_KEEP means that the wait must give up.
struct ArkSpin {
  ark_u32 spins;
  ark_u64 start;
};

enum ArkVerdict { ARK_KEEP, ARK_TIMEOUT, ARK_ABORTED };

// Marks the point in the machine code at which all stores of the block have arrived. Tools that
// check the machine code search for the mark. By default the macro is empty.
#if !defined(ARK_BLOCK_ARRIVED)
#define ARK_BLOCK_ARRIVED()
#endif

// The clock of time limits. A backend whose processors can be suspended (for example, a CPU process
// that was stopped) defines a clock that does not count that time.
#if !defined(ARK_SPIN_TIME)
#define ARK_SPIN_TIME() ark_time_ns()
#endif

// The part of ark_spin that is executed in few polls only. Returns the time at which the wait
// began, 0 if the launch was aborted, or 1 if the time limit is exceeded.
ARK_DEVICE ark_u64 ark_spin_check_here(const ArkParams* p, ArkSpin s, ark_u64 budget_ns) {
  if (ark_aborted(p, (s.spins & ARK_HOST_CHECK) == 0u)) return 0u;
  const ark_u64 now = ARK_SPIN_TIME();
  if (s.start == 0u) return now;
  return now - s.start > budget_ns ? 1u : s.start;
}
ARK_COLD ark_u64 ark_spin_check(const ArkParams* p, ArkSpin s, ark_u64 budget_ns) {
  return ark_spin_check_here(ARK_GIVEN_PARAMS(p), s, budget_ns);
}
// Called after a failed poll: counts the poll, and from time to time checks the abort word and the
// time limit. HERE: true inside of functions for rare cases (ARK_COLD), which must not call further
// functions; the checks are then inlined.
template <bool HERE = false>
ARK_DEVICE ArkVerdict ark_spin(const ArkParams* p, ArkSpin& s, ark_u64 budget_ns) {
  ark_pause(s.spins);
  if ((++s.spins & ARK_SPIN_CHECK) != 0u) return ARK_KEEP;
  s.start = HERE ? ark_spin_check_here(p, s, budget_ns) : ark_spin_check(p, s, budget_ns);
  return s.start > 1u ? ARK_KEEP : s.start == 1u ? ARK_TIMEOUT : ARK_ABORTED;
}

// ark_poll loads a counter once. ark_polled is called once, after the poll that has returned the
// awaited value. On some backends an acquire invalidates caches; there, polls are plain loads, and
// only ark_polled acquires.
#if !defined(ARK_HAS_POLL)
ARK_DEVICE ark_u32 ark_poll(const ark_u32* word, bool system) {
  return ark_load_acquire(word, system);
}
ARK_DEVICE void ark_polled(bool) {}
#endif

// Waits until a counter has reached `want` (comparison modulo 2^32). Returns false after a failure.
// WORDS: the number of words of a counter that peers signal; their sum counts. It is the number of
// ranks if links between ranks support only stores, otherwise 1. why, counter: for ark_report.
template <ark_u32 WORDS = 1u>
ARK_DEVICE bool ark_wait(ArkCtx& c, const ark_u32* word, ark_u32 want, bool system, ark_u32 why,
                         ark_u32 counter, ark_u64 budget_ns) {
  ArkSpin spin{0u, 0u};
  for (;;) {
    ark_u32 seen = ark_poll(word, system);
    for (ark_u32 i = 1u; i < WORDS && system; ++i) seen += ark_poll(word + i, true);
    if (static_cast<ark_i32>(seen - want) >= 0) {
      ark_polled(system);
      return true;
    }
    const ArkVerdict verdict = ark_spin(ARK_PARAMS(c), spin, budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) ark_fail(c, why, counter, want, seen);
    return false;
  }
}

// True if a packet {value, epoch} is of the current iteration.
ARK_DEVICE bool ark_packet_ready(const ArkCtx& c, ark_u64 seen) {
  return static_cast<ark_u32>(seen >> 32) == c.iteration + 1u;
}

// Waits for a packet that had not arrived at the first poll (or was not polled yet), and returns
// its value.
ARK_COLD float ark_late_packet(ArkCtx& given, const ark_u64* packet, bool system) {
  ArkCtx& c = ARK_GIVEN(given);
  ArkSpin spin{0u, 0u};
  while (!ark_failed(c)) {
    const ark_u64 seen = ark_packet_load(packet, system);
    if (ark_packet_ready(c, seen)) return ark_bits_float(static_cast<ark_u32>(seen));
    const ArkParams* p = ARK_GIVEN_PARAMS(c.p);
    const ArkVerdict verdict = ark_spin<ARK_CALLS_WAIT>(p, spin, p->budget_ns);
    if (verdict == ARK_KEEP) continue;
    if (verdict == ARK_TIMEOUT) {
      const ark_u32 found = static_cast<ark_u32>(seen >> 32);
      if (ARK_CALLS_WAIT) {
        ark_fail_here(c, 2u, 0u, c.iteration + 1u, found);
      } else {
        ark_fail(c, 2u, 0u, c.iteration + 1u, found);
      }
    }
    ark_give_up(c);
  }
  return 0.0f;
}
// Reads one packet: repeats the load until the packet's epoch is the current one.
ARK_DEVICE float ark_wait_packet(ArkCtx& c, const ark_u64* packet, bool system) {
  if (ARK_CALLS_WAIT) {
    const ark_u64 seen = ark_packet_load(packet, system);
    if (ark_packet_ready(c, seen)) return ark_bits_float(static_cast<ark_u32>(seen));
  }
  return ark_late_packet(c, packet, system);
}

ARK_DEVICE void ark_publish_packet(ArkCtx& c, ark_u64* packet, float value, bool system) {
  const ark_u64 word = (static_cast<ark_u64>(c.iteration + 1u) << 32) | ark_float_bits(value);
  ark_packet_store(packet, word, system);
}
