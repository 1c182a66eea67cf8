// Workgroups that wait for one another, so all of them must be resident and make progress.
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM

static __device__ __forceinline__ void wait_agent(const unsigned* counter, unsigned least) {
  while (__hip_atomic_load(counter, __ATOMIC_ACQUIRE, AGENT) < least) __builtin_amdgcn_s_sleep(1);
}
static __device__ __forceinline__ void wait_system(const unsigned* counter, unsigned least) {
  while (__hip_atomic_load(counter, __ATOMIC_ACQUIRE, SYSTEM) < least) __builtin_amdgcn_s_sleep(1);
}

// Block b passes its row to block b + 1, which adds its number. There are `rounds` such rounds.
KERNEL ring_exchange(int* rows, unsigned* sent, int* out, int rounds) {
  unsigned t = threadIdx.x, b = blockIdx.x, blocks = gridDim.x, left = (b + blocks - 1) % blocks;
  int value = b * 1000 + t;
  for (int r = 0; r < rounds; ++r) {
    rows[((r & 1) * blocks + b) * blockDim.x + t] = value + (int)b;
    __syncthreads();
    if (t == 0) {
      __hip_atomic_fetch_add(sent + b, 1u, __ATOMIC_RELEASE, AGENT);
      wait_agent(sent + left, r + 1);
    }
    __syncthreads();
    value = rows[((r & 1) * blocks + left) * blockDim.x + t];
    __syncthreads();
    // Rows of rounds r and r + 2 have the same memory, so waits until the next block has read this.
    if (t == 0) {
      __hip_atomic_fetch_add(sent + blocks + b, 1u, __ATOMIC_RELEASE, AGENT);
      wait_agent(sent + blocks + (b + 1) % blocks, r + 1);
    }
    __syncthreads();
  }
  out[b * blockDim.x + t] = value;
}

static __device__ __forceinline__ void grid_barrier(unsigned* arrived, unsigned phase) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __hip_atomic_fetch_add(arrived, 1u, __ATOMIC_ACQ_REL, AGENT);
    wait_agent(arrived, phase * gridDim.x);
  }
  __syncthreads();
}

// In each step every block averages the values that its neighbours wrote in the step before.
KERNEL barrier_stencil(float* lines, unsigned* arrived, int n, int steps) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int s = 0; s < steps; ++s) {
    const float* from = lines + (s & 1) * n;
    float* to = lines + (1 - (s & 1)) * n;
    if (i < n) to[i] = 0.5f * from[i] + 0.25f * (from[(i + n - 1) % n] + from[(i + 1) % n]);
    grid_barrier(arrived, s + 1);
  }
}

// A barrier in two levels: blocks synchronise in groups of four, then one block of each group with
// those of the others (as in a barrier of each chiplet, then of the device).
KERNEL hierarchical_barrier(unsigned* local, unsigned* global, unsigned* go, int* log, int steps) {
  unsigned b = blockIdx.x, group = b / 4, groups = (gridDim.x + 3) / 4;
  unsigned members = gridDim.x - group * 4 < 4 ? gridDim.x - group * 4 : 4;
  for (int s = 1; s <= steps; ++s) {
    if (threadIdx.x == 0) log[b] += (int)b;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned before = __hip_atomic_fetch_add(local + group, 1u, __ATOMIC_ACQ_REL, AGENT);
      if (before + 1 == members * s) {
        __hip_atomic_fetch_add(global, 1u, __ATOMIC_ACQ_REL, AGENT);
        wait_agent(global, groups * s);
        __hip_atomic_store(go + group, (unsigned)s, __ATOMIC_RELEASE, AGENT);
      }
      wait_agent(go + group, s);
      int sum = 0;
      for (unsigned o = 0; o < gridDim.x; ++o) sum += log[o];
      log[gridDim.x + b] = sum;
    }
    __syncthreads();
    grid_barrier(global + 1, s);
  }
}

// Each even block writes to a ring of four slots, and the next block reads from it.
KERNEL single_queues(const int* x, int* slots, unsigned* head, unsigned* tail, int* out,
                     int count) {
  unsigned pair = blockIdx.x / 2, t = threadIdx.x;
  int* ring = slots + pair * 4 * blockDim.x;
  int sum = 0;
  for (unsigned k = 0; k < count; ++k) {
    if (blockIdx.x % 2 == 0) {
      if (t == 0 && k >= 4) wait_agent(tail + pair, k - 3);
      __syncthreads();
      ring[(k & 3) * blockDim.x + t] = x[(pair * count + k) * blockDim.x + t];
      __syncthreads();
      if (t == 0) __hip_atomic_store(head + pair, k + 1, __ATOMIC_RELEASE, AGENT);
    } else {
      if (t == 0) wait_agent(head + pair, k + 1);
      __syncthreads();
      sum += ring[(k & 3) * blockDim.x + t] * (int)(k + 1);
      __syncthreads();
      if (t == 0) __hip_atomic_store(tail + pair, k + 1, __ATOMIC_RELEASE, AGENT);
    }
    __syncthreads();
  }
  if (blockIdx.x % 2) out[pair * blockDim.x + t] = sum;
}

// Blocks take the numbers of tasks from one counter until no task is left.
KERNEL task_tickets(unsigned* next, const int* x, int* out, unsigned* done_by, int tasks) {
  __shared__ unsigned task;
  for (;;) {
    if (threadIdx.x == 0) task = atomicAdd(next, 1u);
    __syncthreads();
    unsigned mine = task;
    __syncthreads();
    if (mine >= tasks) return;
    out[mine * blockDim.x + threadIdx.x] = x[mine * blockDim.x + threadIdx.x] * 3 + (int)mine;
    if (threadIdx.x == 0) atomicAdd(done_by + blockIdx.x, 1u);
    __syncthreads();
  }
}

// A lock around a read-modify-write that is not atomic.
KERNEL spin_lock(unsigned* lock, int* value, int rounds) {
  if (threadIdx.x != 0) return;
  for (int r = 0; r < rounds; ++r) {
    unsigned free = 0;
    while (!__hip_atomic_compare_exchange_strong(lock, &free, 1u, __ATOMIC_ACQUIRE,
                                                 __ATOMIC_RELAXED, AGENT)) {
      free = 0;
      __builtin_amdgcn_s_sleep(1);
    }
    value[0] += (int)blockIdx.x + 1;
    value[1] += 1;
    __hip_atomic_store(lock, 0u, __ATOMIC_RELEASE, AGENT);
  }
}

// Dynamic programming: tile (row, column) waits for its left and upper neighbours, so tiles of a
// diagonal are computed concurrently.
KERNEL wavefront(const int* cost, int* best, unsigned* ready, int columns) {
  if (threadIdx.x != 0) return;
  int row = blockIdx.x;
  for (int c = 0; c < columns; ++c) {
    if (row > 0) wait_agent(ready + row - 1, c + 1);
    int up = row > 0 ? best[(row - 1) * columns + c] : 0x3fffffff;
    int left = c > 0 ? best[row * columns + c - 1] : 0x3fffffff;
    int from = up < left ? up : left;
    best[row * columns + c] = cost[row * columns + c] + (row == 0 && c == 0 ? 0 : from);
    __hip_atomic_store(ready + row, (unsigned)(c + 1), __ATOMIC_RELEASE, AGENT);
  }
}

// A value and its epoch are in one 64-bit word, so the load of the value is also the wait for it.
KERNEL epoch_packets(uint64_t* packets, int* out, int rounds) {
  unsigned t = threadIdx.x, b = blockIdx.x, right = (b + 1) % gridDim.x;
  int value = b * 100 + t;
  for (int r = 1; r <= rounds; ++r) {
    uint64_t packet = (uint64_t)r << 32 | (unsigned)(value + 1);
    uint64_t* there = packets + (r * gridDim.x + right) * blockDim.x + t;
    uint64_t* here = packets + (r * gridDim.x + b) * blockDim.x + t;
    __hip_atomic_store(there, packet, __ATOMIC_RELAXED, AGENT);
    do {
      packet = __hip_atomic_load(here, __ATOMIC_RELAXED, AGENT);
    } while ((packet >> 32) != r);
    value = (int)(unsigned)packet;
  }
  out[b * blockDim.x + t] = value;
}

// One wave writes to LDS and the others read, synchronised by flags in LDS instead of a barrier.
KERNEL lds_flags(const int* x, int* out, int rounds) {
  __shared__ int slot[64];
  __shared__ unsigned full, taken;
  unsigned t = threadIdx.x, wave = t / 64;
  if (t == 0) full = taken = 0;
  __syncthreads();
  int sum = 0;
  for (int r = 0; r < rounds; ++r) {
    if (wave == 0) {
      while (__hip_atomic_load(&taken, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP) < r * 64u) {
      }
      slot[t] = x[(blockIdx.x * rounds + r) * 64 + t];
      __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
      __hip_atomic_fetch_add(&full, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
    } else {
      while (__hip_atomic_load(&full, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP) <
             (r + 1) * 64u) {
      }
      sum += slot[63 - (t & 63)];
      __hip_atomic_fetch_add(&taken, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
    }
  }
  if (wave == 1) out[blockIdx.x * 64 + (t & 63)] = sum;
}

// The clock counter advances during a sleep.
KERNEL clocks(int* order) {
  uint64_t before = __builtin_readsteadycounter();
  __builtin_amdgcn_s_sleep(4);
  uint64_t after = __builtin_readsteadycounter();
  if (threadIdx.x == 0) *order = after > before;
}

struct Command {
  unsigned kind;  // 1: scale x by `value`, 2: add `value`, 3: leave
  int value;
};
// A persistent kernel: the host writes commands into mapped memory and reads the answers while it
// runs.
KERNEL persistent_queue(const Command* commands, const unsigned* posted, unsigned* finished, int* x,
                        int n) {
  __shared__ unsigned kind;
  __shared__ int value;
  for (unsigned step = 0;; ++step) {
    if (threadIdx.x == 0) {
      wait_system(posted, step + 1);
      kind = commands[step].kind;
      value = commands[step].value;
    }
    __syncthreads();
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
      x[i] = kind == 1 ? x[i] * value : kind == 2 ? x[i] + value : x[i];
    unsigned asked = kind;
    __syncthreads();
    if (threadIdx.x == 0) __hip_atomic_fetch_add(finished, 1u, __ATOMIC_RELEASE, SYSTEM);
    if (asked == 3) return;
    __syncthreads();
  }
}

// Each of two devices stores a row to the peer's memory, signals, waits for the peer's signal, and
// reads the row that the peer has stored.
KERNEL put_signal_wait(int* mine, int* peer_inbox, unsigned* peer_flag, const int* inbox,
                       const unsigned* flag, int rank, int rounds) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  for (int r = 1; r <= rounds; ++r) {
    peer_inbox[(r & 1) * n + i] = mine[i] + rank + r;
    __syncthreads();
    if (threadIdx.x == 0) {
      __hip_atomic_fetch_add(peer_flag + blockIdx.x, 1u, __ATOMIC_RELEASE, SYSTEM);
      wait_system(flag + blockIdx.x, r);
    }
    __syncthreads();
    mine[i] = inbox[(r & 1) * n + i];
    __syncthreads();
  }
}
