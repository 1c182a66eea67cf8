// The device's side of the proxy: triggers of 128 bits, which a thread of the host takes from a
// FIFO in its memory. A slot's last word has the parity of the lap in its highest bit, so that
// slots are never cleared; `done` counts what has been served, in the order of the triggers.

// One thread: counts up, and returns what was there.
ARK_DEVICE ark_u32 ark_take_ticket(ark_u32* head) {
  ark_u32 at = ark_load_acquire(head, false);
  for (ark_u32 seen = ark_cas(head, at, at + 1u); seen != at;) {
    at = seen;
    seen = ark_cas(head, at, at + 1u);
  }
  return at;
}

constexpr ark_u32 ARK_FIFO_SLOTS = sizeof(ArkFifo{}.words) / sizeof(ArkTrigger);

// One thread: asks the host to copy `size` bytes, or, with none, to add `source` to the counter at
// `target`. Everything that the thread has seen comes before it. The position behind the trigger,
// or 0 where the host has left no room within the budget.
ARK_BODY bool ark_proxy_push(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size,
                             ark_u32& behind) {
  const ArkParams* p = ARK_PARAMS(c);
  const ark_u32 at = ark_take_ticket(&ark_control(p)->fifo_head);
  behind = at + 1u;
  ArkFifo* fifo = ARK_POINTER(ArkFifo, p->fifo);
  if (!ark_wait(c, &fifo->done, behind - ARK_FIFO_SLOTS, true, 7u, 0u, p->budget_ns)) return false;
  ArkTrigger* slot = reinterpret_cast<ArkTrigger*>(fifo->words) + at % ARK_FIFO_SLOTS;
  ark_post_host(&slot->source, static_cast<ark_u32>(source));
  ark_post_host(&slot->target, static_cast<ark_u32>(target));
  ark_post_host(&slot->high, static_cast<ark_u32>(source >> 32 & 0xffffu) |
                                 static_cast<ark_u32>(target >> 32 & 0xffffu) << 16);
  const ark_u32 lap = (at / ARK_FIFO_SLOTS & 1u) ^ 1u;
  ark_store_host(&slot->size, size | lap << 31);
  return true;
}

// One thread: copies bytes by the proxy and waits until they are there; false if they do not come.
ARK_DEVICE bool ark_proxy_copy(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size) {
  ark_u32 behind = 0u;
  ArkFifo* fifo = ARK_POINTER(ArkFifo, ARK_PARAMS(c)->fifo);
  return ark_proxy_push(c, source, target, size, behind) &&
         ark_wait(c, &fifo->done, behind, true, 7u, 0u, ARK_PARAMS(c)->budget_ns);
}
