// Device-initiated DMA: a kernel writes packets into a queue's ring, then the write pointer, then
// the doorbell.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM

struct Queue {
  uint32_t* ring;
  uint64_t* write_pointer;
  uint64_t* read_pointer;
  uint64_t* doorbell;
  uint64_t ring_bytes;
};

static __device__ __forceinline__ void put_word(const Queue& queue, uint64_t at, unsigned index,
                                                uint32_t word) {
  __hip_atomic_store(queue.ring + (at / 4 + index) % (queue.ring_bytes / 4), word, __ATOMIC_RELAXED,
                     SYSTEM);
}

static __device__ __forceinline__ void put_address(const Queue& queue, uint64_t at, unsigned index,
                                                   const void* address) {
  put_word(queue, at, index, (uint32_t)(uint64_t)address);
  put_word(queue, at, index + 1, (uint32_t)((uint64_t)address >> 32));
}

// Writes two packets of 15 words together: a copy, then an addition to a 64-bit signal. Only one
// thread writes to the queue.
static __device__ __forceinline__ void copy_and_signal(const Queue& queue, uint64_t at,
                                                       const void* from, void* to, unsigned bytes,
                                                       uint64_t* signal) {
  put_word(queue, at, 0, 1);
  put_word(queue, at, 1, bytes - 1);
  put_word(queue, at, 2, 0);
  put_address(queue, at, 3, from);
  put_address(queue, at, 5, to);
  put_word(queue, at, 7, 10u | 47u << 25);
  put_address(queue, at, 8, signal);
  put_word(queue, at, 10, 1);
  for (unsigned k = 11; k < 15; ++k) put_word(queue, at, k, 0);
  __hip_atomic_store(queue.write_pointer, at + 60, __ATOMIC_RELEASE, SYSTEM);
  __hip_atomic_store(queue.doorbell, at + 60, __ATOMIC_RELEASE, SYSTEM);
}

// In each round: fills a row, has the DMA engine copy it to the peer, waits for the peer's row, and
// adds it up.
KERNEL dma_exchange(Queue queue, int* row, int* peer_inbox, uint64_t* peer_signal, const int* inbox,
                    const uint64_t* signal, int* sum, int rank, int rounds) {
  unsigned t = threadIdx.x, n = blockDim.x;
  int total = 0;
  for (int r = 0; r < rounds; ++r) {
    row[r * n + t] = rank * 1000 + r * 100 + (int)t;
    __threadfence_system();
    __syncthreads();
    if (t == 0) {
      uint64_t at = (uint64_t)r * 60;
      while (at + 60 - __hip_atomic_load(queue.read_pointer, __ATOMIC_ACQUIRE, SYSTEM) >
             queue.ring_bytes)
        __builtin_amdgcn_s_sleep(1);
      copy_and_signal(queue, at, row + r * n, peer_inbox + r * n, n * 4, peer_signal);
      while (__hip_atomic_load(signal, __ATOMIC_ACQUIRE, SYSTEM) < (uint64_t)(r + 1))
        __builtin_amdgcn_s_sleep(1);
    }
    __syncthreads();
    total += inbox[r * n + t] * (r + 1);
    __syncthreads();
  }
  sum[t] = total;
}

// A planted fault: rings the doorbell before it writes the write pointer.
KERNEL doorbell_first(Queue queue) {
  if (threadIdx.x != 0) return;
  put_word(queue, 0, 0, 0);
  __hip_atomic_store(queue.doorbell, 4ull, __ATOMIC_RELEASE, SYSTEM);
}
