// Checks of the properties of a device that the loop kernel relies on. They use the device ABI
// only, without tasks or the loop. A launch runs one check; its number is in the field `first` of
// ArkParams. These fields have a different meaning here than in the loop: tasks is the address of
// the data, counter_ops the address of words at a distance of 128 bytes, fetches the address of the
// results, trace_capacity the number of 4-byte words of data, barrier_step the number of rounds,
// and persistent is nonzero to use the memory scope of the whole system.

ARK_DEVICE ark_u32* ark_word(const ArkParams* p, ark_u32 i) {
  return ARK_POINTER(ark_u32, p->counter_ops) + 32u * i;
}
ARK_DEVICE void ark_count(const ArkParams* p, ark_u32 result, ark_u32 by) {
  if (by != 0u) ark_add_release(ARK_POINTER(ark_u32, p->fetches) + result, by, false);
}
ARK_DEVICE ark_u32 ark_expected(ark_u32 round, ark_u32 i) { return round * 7919u + i * 31u + 1u; }

// Called by one thread: waits for a counter by the same instructions as the loop kernel. Returns
// false if the time limit is exceeded.
ARK_DEVICE bool ark_reached(const ArkParams* p, const ark_u32* word, ark_u32 want, ark_u64 start) {
  const bool system = p->persistent != 0u;
  for (ark_u32 spins = 0u;; ++spins) {
    if (static_cast<ark_i32>(ark_poll(word, system) - want) >= 0) {
      ark_polled(system);
      return true;
    }
    if (ark_time_ns() - start > p->budget_ns) return false;
    ark_pause(spins);
  }
}
ARK_DEVICE bool ark_told(const ArkParams* p, ark_u32 want, ark_u64 start) {
  for (ark_u32 spins = 0u; ark_load_host(&ark_host(p)->target) < want; ++spins) {
    if (ark_time_ns() - start > p->budget_ns) return false;
    ark_pause(spins);
  }
  return true;
}

// A barrier of all processors: each waits until all have begun the round. It is repeated for the
// given number of rounds.
ARK_DEVICE void ark_check_meet(const ArkParams* p, ark_u64 start) {
  if (ark_tid() != 0) return;
  for (ark_u32 round = 1u; round <= p->barrier_step; ++round) {
    ark_add_release(ark_word(p, 0u), 1u, p->persistent != 0u);
    if (!ark_reached(p, ark_word(p, 0u), round * p->processors, start)) return;
    ark_count(p, 0u, 1u);
  }
}

// Checks messages between pairs of processors. One processor stores data by plain stores and then
// signals a counter; the other waits for the counter and reads the data. Results: the number of
// completed rounds, and the number of wrong words.
ARK_DEVICE void ark_check_message(const ArkParams* p, ark_u32 processor, ark_u64 start) {
  const ark_u32 pair = processor / 2u, words = p->trace_capacity;
  if ((processor | 1u) >= p->processors) return;
  ark_u32* data = ARK_POINTER(ark_u32, p->tasks) + static_cast<ark_u64>(pair) * words;
  ark_u32* sent = ark_word(p, 2u * pair);
  ark_u32* taken = ark_word(p, 2u * pair + 1u);
  const bool writes = processor % 2u == 0u, system = p->persistent != 0u;
  for (ark_u32 round = 1u; round <= p->barrier_step; ++round) {
    bool go = true;
    if (ark_tid() == 0)
      go = ark_reached(p, writes ? taken : sent, writes ? round - 1u : round, start);
    if (!ark_all(go)) return;
    ark_u32 wrong = 0u;
    for (ark_u32 i = ark_tid(); i < words; i += ARK_THREADS) {
      if (writes) {
        data[i] = ark_expected(round, i);
      } else {
        wrong += data[i] != ark_expected(round, i) ? 1u : 0u;
      }
    }
    ark_count(p, 1u, wrong);
    ark_all(true);
    if (ark_tid() == 0) {
      if (!writes) ark_count(p, 0u, 1u);
      ark_add_release(writes ? sent : taken, 1u, system);
    }
  }
}

// Checks packets between pairs of processors: one processor overwrites packets while the other
// reads them. Results: the number of threads that saw the last round, the number of torn packets,
// and the number of reads that returned an older packet than an earlier read.
ARK_DEVICE void ark_check_packets(const ArkParams* p, ark_u32 processor, ark_u64 start) {
  const ark_u32 pair = processor / 2u;
  if ((processor | 1u) >= p->processors) return;
  const bool system = p->persistent != 0u;
  ark_u64* packet = ARK_POINTER(ark_u64, p->tasks) +
                    (static_cast<ark_u64>(pair) * ARK_THREADS + static_cast<ark_u32>(ark_tid()));
  if (processor % 2u == 0u) {
    for (ark_u32 epoch = 1u; epoch <= p->barrier_step; ++epoch) {
      const ark_u64 high = static_cast<ark_u64>(epoch) << 32;
      ark_packet_store(packet, high | ark_expected(epoch, 0u), system);
    }
    return;
  }
  ark_u32 last = 0u;
  while (last < p->barrier_step && ark_time_ns() - start <= p->budget_ns) {
    const ark_u64 seen = ark_packet_load(packet, system);
    const ark_u32 epoch = static_cast<ark_u32>(seen >> 32);
    if (epoch != 0u && static_cast<ark_u32>(seen) != ark_expected(epoch, 0u)) ark_count(p, 1u, 1u);
    if (epoch < last) ark_count(p, 2u, 1u);
    last = epoch > last ? epoch : last;
  }
  if (last == p->barrier_step) ark_count(p, 0u, 1u);
}

// Words are exchanged with the host in both directions while the kernel runs. In each round the
// host first copies data to the device and then signals the kernel. After the signal the kernel
// reads the data and counts the words that have not arrived. Results: the number of rounds, and the
// number of wrong words.
ARK_DEVICE void ark_check_host(const ArkParams* p, ark_u32 processor, ark_u64 start) {
  const ark_u32* data = ARK_POINTER(const ark_u32, p->tasks);
  for (ark_u32 round = 1u; round <= p->barrier_step; ++round) {
    bool go = true;
    if (ark_tid() == 0) go = ark_told(p, round, start);
    if (!ark_all(go)) return;
    ark_u32 wrong = 0u;
    for (ark_u32 i = ark_tid(); i < p->trace_capacity; i += ARK_THREADS) {
      wrong += data[i] != ark_expected(round, i) ? 1u : 0u;
    }
    ark_count(p, 1u, wrong);
    ark_all(true);
    if (ark_tid() != 0) continue;
    ark_add_release(ark_word(p, 0u), 1u, false);
    if (processor != 0u) continue;
    if (ark_reached(p, ark_word(p, 0u), round * p->processors, start)) {
      ark_count(p, 0u, 1u);
      ark_store_host(&ark_host(p)->done, round);
    }
  }
}

// Checks the clock. In each round, all processors pass a barrier, and then each records its time.
// After the rounds the kernel runs for idle_ns nanoseconds. Results: the 64-bit times of each
// processor in each round.
ARK_DEVICE void ark_check_clock(const ArkParams* p, ark_u32 processor, ark_u64 start) {
  if (ark_tid() != 0) return;
  ark_u64* times =
      ARK_POINTER(ark_u64, p->tasks) + static_cast<ark_u64>(processor) * p->barrier_step;
  for (ark_u32 round = 1u; round <= p->barrier_step; ++round) {
    ark_add_release(ark_word(p, 0u), 1u, false);
    if (!ark_reached(p, ark_word(p, 0u), round * p->processors, start)) return;
    times[round - 1u] = ark_time_ns();
    ark_add_release(ark_word(p, 1u), 1u, false);
    if (!ark_reached(p, ark_word(p, 1u), round * p->processors, start)) return;
  }
  const ark_u64 begin = ark_time_ns();
  for (ark_u32 spins = 0u; ark_time_ns() - begin < p->idle_ns; ++spins) ark_pause(spins);
}

// Each thread of all processors adds to one counter `barrier_step` times.
ARK_DEVICE void ark_check_add(const ArkParams* p) {
  for (ark_u32 round = 0u; round < p->barrier_step; ++round) {
    ark_add_release(ark_word(p, 0u), 1u, p->persistent != 0u);
  }
}

// Reads all data `barrier_step` times. The result is a sum, so that the compiler cannot remove the
// loads.
ARK_DEVICE void ark_check_read(const ArkParams* p, ark_u32 processor) {
  const ark_u64* data = ARK_POINTER(const ark_u64, p->tasks);
  const ark_u64 count = p->trace_capacity / 2u;
  const ark_u64 stride = static_cast<ark_u64>(p->processors) * ARK_THREADS;
  ark_u64 sum = 0u;
  for (ark_u32 round = 0u; round < p->barrier_step; ++round) {
    ark_u64 i = static_cast<ark_u64>(processor) * ARK_THREADS + static_cast<ark_u32>(ark_tid());
    for (; i + 7u * stride < count; i += 8u * stride) {
      ark_u64 part = 0u;
#pragma unroll
      for (int k = 0; k < 8; ++k) part += data[i + k * stride];
      sum += part;
    }
    for (; i < count; i += stride) sum += data[i];
  }
  ark_count(p, 0u, static_cast<ark_u32>(sum));
}

ARK_DEVICE void ark_run(const ArkParams* p, ark_u32 processor, char*) {
  const ark_u64 start = ark_time_ns();
  switch (p->first) {
    case 0u:
      ark_check_meet(p, start);
      break;
    case 1u:
      ark_check_message(p, processor, start);
      break;
    case 2u:
      ark_check_packets(p, processor, start);
      break;
    case 3u:
      ark_check_host(p, processor, start);
      break;
    case 4u:
      ark_check_clock(p, processor, start);
      break;
    case 5u:
      ark_check_add(p);
      break;
    default:
      ark_check_read(p, processor);
      break;
  }
}
