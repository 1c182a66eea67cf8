// The device's part of the proxy, a host thread that executes requests of the device (copies and
// signals). The device writes requests of 128 bits, called triggers, to a FIFO in host memory. The
// highest bit of a slot's last word alternates with each round of the FIFO, so that slots need not
// be cleared. `done` is the number of triggers that have been executed, in order.

// Called by one thread: atomically increments the number at `head` and returns its previous value.
ARK_DEVICE ark_u32 ark_take_ticket(ark_u32* head) {
  ark_u32 at = ark_load_acquire(head, false);
  for (ark_u32 seen = ark_cas(head, at, at + 1u); seen != at;) {
    at = seen;
    seen = ark_cas(head, at, at + 1u);
  }
  return at;
}

constexpr ark_u32 ARK_FIFO_SLOTS = sizeof(ArkFifo{}.words) / sizeof(ArkTrigger);

// Called by one thread: requests that the host copies `size` bytes or, if size is 0, adds `source`
// to the counter at `target`. All writes that the thread has made or seen before are visible to the
// copy. Sets `behind` to the value that `done` will have afterwards. Returns false if the FIFO has
// no room within the time limit.
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

// Called by one thread: copies bytes by the proxy and waits until they have arrived. Returns false
// if they do not arrive within the time limit.
ARK_DEVICE bool ark_proxy_copy(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size) {
  ark_u32 behind = 0u;
  ArkFifo* fifo = ARK_POINTER(ArkFifo, ARK_PARAMS(c)->fifo);
  return ark_proxy_push(c, source, target, size, behind) &&
         ark_wait(c, &fifo->done, behind, true, 7u, 0u, ARK_PARAMS(c)->budget_ns);
}
