// Requests to an SDMA engine, in the packet format of the Linux driver's public headers (SDMA 4.4,
// 6). A request fills a slot of 64 bytes of the ring. It has three packets: a NOP, which pads the
// request to the slot's size, so that no packet crosses the end of the ring; a linear copy; and a
// fence, which writes a word when the copy is done. The fence is the last packet, so the word also
// shows that the engine has read the slot.

#define ARK_HAS_COPY_QUEUE 1
constexpr ark_u32 ARK_REQUEST_BYTES = 64u;
constexpr ark_u32 ARK_REQUEST_MOST = 1u << 22;  // 22 bits of size in all versions of the packet
#if defined(__GFX9__)
constexpr ark_u32 ARK_SDMA_FENCE = 5u;
#else
constexpr ark_u32 ARK_SDMA_FENCE = 5u | 3u << 16;  // the write bypasses the caches
#endif

// Writes a copy request to the address `slot` in the ring. Called by one thread. When the copy is
// complete, the engine writes `value` to the word at `done`.
ARK_DEVICE void ark_queue_request(ark_u64 slot, ark_u64 source, ark_u64 target, ark_u32 size,
                                  ark_u64 done, ark_u32 value) {
  const ark_u64 words[8] = {
      4ull << 16,  // NOP, with four more words to skip
      0u,
      1ull << 32,                       // COPY_LINEAR,
      static_cast<ark_u64>(size - 1u),  // its size less one, no parameters,
      source,
      target,
      ARK_SDMA_FENCE | done << 32,
      done >> 32 | static_cast<ark_u64>(value) << 32,
  };
  ark_u64* to = ARK_POINTER(ark_u64, slot);
  for (int i = 0; i < 8; ++i) ark_packet_store(to + i, words[i], true);
}

// Informs the engine about requests that were added to the ring. Called by one thread at a time.
// The engine reads memory past the caches, so the caches are first written back, including the data
// to copy.
ARK_DEVICE void ark_queue_tell(ark_u64 write_pointer, ark_u64 doorbell) {
  ark_u64* written = ARK_POINTER(ark_u64, write_pointer);
  const ark_u64 behind = ark_packet_load(written, true) + ARK_REQUEST_BYTES;
  ark_release_to_system();
  ark_packet_store(written, behind, true);
  ARK_RELEASED("system");
  ark_drain();
  ark_packet_store(ARK_POINTER(ark_u64, doorbell), behind, true);
}
