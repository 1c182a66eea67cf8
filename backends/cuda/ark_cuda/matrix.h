// The variant `matrix`: two warpgroups multiply, one thread of a third loads their operands through
// tensor maps into a ring of stages, and runs ahead of them over the tiles of one op. Ahead of the
// list's order it goes no further: what another op has written on this processor has no counter.

#define ARK_HAS_LOADER 1
constexpr ark_u32 ARK_MATRIX_STAGES = 4u;
constexpr ark_u32 ARK_MATRIX_STAGE = 49152u;  // bytes: 128 rows of a, up to 256 of b, 64 deep
constexpr ark_u32 ARK_MATRIX_SLAB = 2048u;    // 16 by 64 elements on their way out, one a warp
constexpr int ARK_MATRIX_GROUPS = ARK_WARPS / 4;
static_assert(ARK_MATRIX_GROUPS == 2, "a tile has 128 rows");

struct ArkMatrixRing {
  ark_u64 full[ARK_MATRIX_STAGES];
  ark_u64 empty[ARK_MATRIX_STAGES];
  ark_u32 used[ARK_MATRIX_GROUPS];  // stages that a warpgroup has consumed since launch
  ark_u64 begun;    // how many tasks have begun since launch, and the running one's place
  ark_u32 kind;     // that one's
  ark_u32 count;    // tasks begun, the computing warps' own
  ark_u32 leave;    // they have left the loop
  ark_u32 stopped;  // the loading thread has given up a wait
};

__shared__ ArkMatrixRing ark_matrix;

ARK_DEVICE char* ark_matrix_stage(ArkCtx& c, ark_u32 n) {
  const ark_u64 base = (reinterpret_cast<ark_u64>(ARK_SCRATCH(c)) + 1023u) & ~1023ull;
  return reinterpret_cast<char*>(base) + n % ARK_MATRIX_STAGES * ARK_MATRIX_STAGE;
}
ARK_DEVICE char* ark_matrix_slab(ArkCtx& c, int warp) {
  return ark_matrix_stage(c, 0u) + ARK_MATRIX_STAGES * ARK_MATRIX_STAGE + warp * ARK_MATRIX_SLAB;
}

ARK_DEVICE ark_u32 ark_shared_word(const ark_u32* p) {
  return *const_cast<const volatile ark_u32*>(p);
}

// Called by all threads before anything else.
ARK_DEVICE void ark_matrix_open() {
  if (threadIdx.x == 0) {
    for (ark_u32 i = 0u; i < ARK_MATRIX_STAGES; ++i) {
      ark_barrier_init(&ark_matrix.full[i], 1u);
      ark_barrier_init(&ark_matrix.empty[i], ARK_MATRIX_GROUPS);
    }
    ark_matrix.used[0] = ark_matrix.used[1] = ark_matrix.leave = ark_matrix.stopped = 0u;
    ark_matrix.begun = 0u;
    ark_matrix.count = 0u;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
}
// A warpgroup's registers: the one that loads gives up most of its own to those that compute.
ARK_DEVICE void ark_matrix_loads_only() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
ARK_DEVICE void ark_matrix_computes() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
// Called by the computing threads when they have left the loop.
ARK_DEVICE void ark_matrix_close() {
  if (threadIdx.x == 0) *const_cast<volatile ark_u32*>(&ark_matrix.leave) = 1u;
}
// Called by them when a task begins: everything before it in the list is done. `begun` is 0 while
// its kind is written, so that the loading thread sees both of one task.
ARK_DEVICE void ark_task_begins(ArkCtx& c, const ArkTask& t) {
  if (threadIdx.x != 0) return;
  volatile ark_u64* begun = &ark_matrix.begun;
  const ark_u64 number = ++ark_matrix.count;
  const ark_u32 at = ark_warp_load(&c.warps[0]) & ~ARK_GAVE_UP;
  *begun = 0u;
  __threadfence_block();
  *const_cast<volatile ark_u32*>(&ark_matrix.kind) = t.kind;
  __threadfence_block();
  *begun = number << 32 | at;
}

// Waits for a stage without a call, which would part the products before it from those behind. What
// the loading thread itself waits for has a budget and sees the abort word; when it stops, it says
// so. The warps then go on with what lies there, and stay together until the vote at the task's
// end.
ARK_DEVICE void ark_matrix_filled(ArkCtx& c, ark_u32 n) {
  ark_u64* barrier = &ark_matrix.full[n % ARK_MATRIX_STAGES];
  while (!ark_barrier_passed(barrier, n / ARK_MATRIX_STAGES & 1u)) {
    if (ark_shared_word(&ark_matrix.stopped) == 0u) continue;
    ark_give_up(c);
    break;
  }
}
// Loader: the stage that used the slot before has been given back; false when there is no use for
// more.
ARK_DEVICE bool ark_matrix_free(ark_u32 n) {
  ark_u64* barrier = &ark_matrix.empty[n % ARK_MATRIX_STAGES];
  while (!ark_barrier_passed(barrier, (n / ARK_MATRIX_STAGES + 1u) & 1u)) {
    if (ark_shared_word(&ark_matrix.leave) != 0u) return false;
  }
  return true;
}

// What a task's loading half gets: the running number of the next stage.
struct ArkMatrixLoad {
  ark_u32 issued;
  bool stopped;
};

// The running task's place, as far as the loader can see.
ARK_DEVICE ark_u32 ark_matrix_begun() {
  const volatile ark_u64* begun = const_cast<const volatile ark_u64*>(&ark_matrix.begun);
  ark_u64 now = *begun;
  while (now == 0u) now = *begun;
  return static_cast<ark_u32>(now);
}
// What others have written by ordinary stores is there for copies too.
ARK_DEVICE void ark_proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Has a kind a loading half? Then runs it.
ARK_DEVICE bool ark_loads(ark_u32 kind);
ARK_DEVICE void ark_dispatch_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load);

// The waits of a task that the loader takes ahead of the computing warps; false if they have left.
// It needs no budget: in time they come to the same waits, and theirs has one.
ARK_DEVICE bool ark_matrix_ready(const ArkCtx& c, const ArkTask& t, ark_u32 at) {
  const ArkCounterOp* ops = ARK_POINTER(const ArkCounterOp, ARK_PARAMS(c)->counter_ops);
  for (ark_u32 w = t.wait_begin; w < t.wait_end; ++w) {
    const ArkCounterOp e = ops[w];
    const ark_u32 want = e.step * c.phase_iteration + e.value;
    const bool system = (e.flags & 1u) != 0u;
    while (static_cast<ark_i32>(ark_load_acquire(ark_words(e.address), system) - want) < 0) {
      if (ark_shared_word(&ark_matrix.leave) != 0u) return false;
      if (ark_matrix_begun() == at) return true;
      __nanosleep(20);
    }
  }
  return true;
}

// The loading thread's whole life. It calls no function: what the compiler makes of one may use
// registers that this warpgroup has given up. It follows the computing warps from task to task and
// runs ahead while the tiles are of one op; of the rest of its warpgroup nobody is needed. A task's
// record is in its slot from when the task before it begins.
ARK_DEVICE void ark_matrix_run(const ArkParams* p, char* scratch) {
  ArkLoop& loop = *reinterpret_cast<ArkLoop*>(scratch);
  ArkCtx& c = loop.ctx;
  const volatile ark_u64* running = const_cast<const volatile ark_u64*>(&ark_matrix.begun);
  ArkMatrixLoad load{0u, false};
  ark_u32 handled = 0u;
  while (!load.stopped && ark_shared_word(&ark_matrix.leave) == 0u) {
    const ark_u64 begun = *running;
    const ark_u32 number = static_cast<ark_u32>(begun >> 32);
    if (begun == 0u || static_cast<ark_i32>(number - handled) <= 0) {
      __nanosleep(20);
      continue;
    }
    // A task with a loading half waits for it; others may pass by, and the iteration with them.
    __threadfence_block();
    ark_u32 at = static_cast<ark_u32>(begun);
    const ark_u32 kind = ark_shared_word(&ark_matrix.kind);
    const ark_u32 end = ark_shared_word(&c.task_end);
    __threadfence_block();
    if (*running != begun) continue;
    handled = number;
    if (!ark_loads(kind)) continue;
    const ark_u32 op = loop.tasks[at % ARK_SLOTS].op;
    ark_proxy_fence();
    ark_dispatch_load(c, loop.tasks[at % ARK_SLOTS], load);
    for (++at; at < end && !load.stopped; ++at, ++handled) {
      // Never far: `at` is of the iteration that runs, and the one before it has stages to wait
      // for.
      while (ark_shared_word(&ark_matrix.leave) == 0u && ark_matrix_begun() + 1u < at) {
      }
      __threadfence_block();
      const ArkTask& next = loop.tasks[at % ARK_SLOTS];
      if (next.op != op) break;
      if (!ark_matrix_ready(c, next, at)) {
        load.stopped = true;
        break;
      }
      ark_proxy_fence();
      ark_dispatch_load(c, next, load);
    }
  }
  *const_cast<volatile ark_u32*>(&ark_matrix.stopped) = 1u;
  // A block must not end while copies into its shared memory are under way.
  const ark_u32 behind = load.issued < ARK_MATRIX_STAGES ? load.issued : ARK_MATRIX_STAGES;
  for (ark_u32 n = load.issued - behind; n != load.issued; ++n) {
    while (
        !ark_barrier_passed(&ark_matrix.full[n % ARK_MATRIX_STAGES], n / ARK_MATRIX_STAGES & 1u)) {
    }
  }
}

// Starts the copy of a box into shared memory; x is the innermost coordinate.
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, ark_u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(ark_shared_address(barrier))
      : "memory");
}
ARK_DEVICE void ark_box_load(char* to, ark_u64 map, int x, int y, int i1, int i0,
                             ark_u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(ark_shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(i1), "r"(i0), "r"(ark_shared_address(barrier))
      : "memory");
}
ARK_DEVICE void ark_matrix_expect(ark_u64* barrier, ark_u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ark_shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// wgmma's description of an operand in shared memory: rows of 128 bytes, swizzled, in blocks of
// eight rows; `lead` is the distance of blocks of 64 elements side by side, in 16 bytes.
ARK_DEVICE ark_u64 ark_matrix_operand(const char* at, ark_u32 lead) {
  return (ark_shared_address(at) & 0x3ffffu) >> 4 | static_cast<ark_u64>(lead) << 16 | 64ull << 32 |
         1ull << 62;
}
ARK_DEVICE ark_u32 ark_pack_pair(ark_bf16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
ARK_DEVICE ark_u32 ark_pack_pair(ark_f16*, float low, float high) {
  ark_u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// A warp's 16 rows of 64 columns of sums, rounded, into its slab; 16-byte pieces of a row of 128
// bytes change places with the row, so that no access meets a bank twice.
template <typename T>
ARK_DEVICE void ark_matrix_slab_fill(char* slab, const float* d) {
  const int lane = ark_lane(), row = lane & 15;
  T* type = nullptr;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int chunk = j + (lane >> 4);
    const ark_u32 to = ark_shared_address(slab) + row * 128 + ((chunk ^ (row & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(ark_pack_pair(type, d[4 * j], d[4 * j + 1])),
                 "r"(ark_pack_pair(type, d[4 * j + 2], d[4 * j + 3])),
                 "r"(ark_pack_pair(type, d[4 * j + 4], d[4 * j + 5])),
                 "r"(ark_pack_pair(type, d[4 * j + 6], d[4 * j + 7]))
                 : "memory");
  }
}
// Stores a tile of COLUMNS columns: each warp its 16 rows, in whole lines, without waiting for
// anybody. out: the tile's first element; rows, columns: how many of the result follow it.
template <typename T, int COLUMNS>
ARK_DEVICE void ark_matrix_give(ArkCtx& c, const float* d, T* out, ark_i64 pitch, int rows,
                                int columns) {
  char* slab = ark_matrix_slab(c, ark_warp());
  const bool wide = ark_aligned(reinterpret_cast<ark_u64>(out));
#pragma unroll
  for (int q = 0; q < COLUMNS; q += 64) {
    __syncwarp();
    ark_matrix_slab_fill<T>(slab, d + q / 2);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int local = 4 * i + ark_lane() / 8, piece = ark_lane() % 8;
      const int row = 16 * ark_warp() + local, column = q + 8 * piece;
      const ArkPack<T, 8> pack = *reinterpret_cast<const ArkPack<T, 8>*>(
          slab + local * 128 + ((piece ^ (local & 7)) << 4));
      if (row >= rows) continue;
      if (wide && column + 8 <= columns) {
        ark_store_pack<8>(out + row * pitch + column, pack);
        continue;
      }
      for (int j = 0; j < 8 && column + j < columns; ++j) out[row * pitch + column + j] = pack.v[j];
    }
  }
}
// Eight neighbouring results at a time for `eight(row, column, values, how many are there)`: each
// warp's 16 rows of 32 columns go through its slab unrounded.
template <int COLUMNS, class Eight>
ARK_DEVICE void ark_matrix_each(ArkCtx& c, float (&d)[COLUMNS / 2], int rows, int columns,
                                const Eight& eight) {
  char* slab = ark_matrix_slab(c, ark_warp());
  const int lane = ark_lane();
  // Pieces of 16 bytes change places so that neither four rows of pairs nor two rows of eights
  // meet in a bank.
  const auto piece = [&](int row, int at) {
    return slab + row * 128 + ((at ^ ((row & 3) << 1 | (row & 1))) << 4);
  };
  // A loop, so that what is done to an element is there once; the sums move up meanwhile.
#pragma unroll 1
  for (int q = 0; q < COLUMNS; q += 32) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const float* pair = d + 4 * j + 2 * high;
        char* to = piece(lane / 4 + 8 * high, 2 * j + (lane & 3) / 2) + 8 * (lane & 1);
        *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int i = 0; i + 16 < COLUMNS / 2; ++i) d[i] = d[i + 16];
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int local = 8 * i + lane / 4, row = 16 * ark_warp() + local, column = q + lane % 4 * 8;
      const float4 low = *reinterpret_cast<const float4*>(piece(local, lane % 4 * 2));
      const float4 high = *reinterpret_cast<const float4*>(piece(local, lane % 4 * 2 + 1));
      const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const int left = columns - column < 8 ? columns - column : 8;
      if (row < rows && left > 0) eight(row, column, v, left);
    }
  }
}
