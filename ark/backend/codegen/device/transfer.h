// Copies by the device's copy engines. If kernels can write a copy engine's queue, and the host has
// created such a queue, the request is written to it. Otherwise the request goes to the proxy, a
// host thread that starts the copy.

#if defined(ARK_HAS_COPY_QUEUE)
// A backend defines how a request to a copy engine is encoded and how the engine is notified of it.
// A request takes ARK_REQUEST_BYTES in the queue's ring and copies at most ARK_REQUEST_MOST bytes;
// then the engine writes a word. If several processors use a queue, each takes a ticket, and the
// engine is notified in the order of the tickets. This part is the same for all backends.

// Called by one thread: writes a request and informs the engine. Sets `behind` to the number that
// the engine writes when the copy is complete. Returns false if the queue has no room within the
// time limit.
ARK_BODY bool ark_queue_push(ArkCtx& c, ArkQueue* queue, ark_u64 source, ark_u64 target,
                             ark_u32 size, ark_u32& behind) {
  const ark_u64 budget = ARK_PARAMS(c)->budget_ns;
  const ark_u32 at = ark_take_ticket(&queue->head);
  behind = at + 1u;
  if (!ark_wait(c, &queue->done, behind - queue->slots, true, 8u, 0u, budget)) return false;
  const ark_u64 slot = queue->ring + (at & (queue->slots - 1u)) * ARK_REQUEST_BYTES;
  ark_queue_request(slot, source, target, size, reinterpret_cast<ark_u64>(&queue->done), behind);
  if (!ark_wait(c, &queue->told, at, false, 8u, 0u, budget)) return false;
  ark_queue_tell(queue->write_pointer, queue->doorbell);
  ark_add_release(&queue->told, 1u, false);
  return true;
}

// Called by one thread: copies bytes and waits until they have arrived. Returns false if they do
// not arrive within the time limit.
ARK_BODY bool ark_queue_copy(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size) {
  ArkQueue* queue = ARK_POINTER(ArkQueue, ARK_PARAMS(c)->queue);
  ark_u32 behind = 0u;
  for (ark_u32 at = 0u; at < size; at += ARK_REQUEST_MOST) {
    const ark_u32 part = size - at < ARK_REQUEST_MOST ? size - at : ARK_REQUEST_MOST;
    if (!ark_queue_push(c, queue, source + at, target + at, part, behind)) return false;
  }
  return ark_wait(c, &queue->done, behind, true, 8u, 0u, ARK_PARAMS(c)->budget_ns);
}
#endif

// Called by all threads of the block: copies bytes and waits until they have arrived. The first
// thread does all the work.
ARK_DEVICE void ark_transfer(ArkCtx& c, ark_u64 source, ark_u64 target, ark_u32 size) {
  if (ark_tid() != 0) return;
#if defined(ARK_HAS_COPY_QUEUE)
  if (ARK_PARAMS(c)->queue != 0u) {
    if (!ark_queue_copy(c, source, target, size)) ark_give_up(c);
    return;
  }
#endif
  if (!ark_proxy_copy(c, source, target, size)) ark_give_up(c);
}
