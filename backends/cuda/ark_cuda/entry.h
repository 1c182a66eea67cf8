// The loop kernel's entry point on NVIDIA GPUs. It is launched cooperatively with one block per
// processor (SM), all of them resident. If the kernel has an operand ring, the last warp of a block
// loads into the ring (the loading warp). In the variant `roles`, the warp before it waits for
// counters and signals them (the communicating or lead warp). All other warps compute.

constexpr int ARK_BLOCK_THREADS = 32 * ARK_BLOCK_WARPS;

// Reports an error if `ark_shared` does not begin where the address arithmetic of task bodies
// assumes it: at a multiple of 1024 bytes.
ARK_DEVICE void ark_report_misaligned(const ArkParams* p, ark_u32 begin) {
  ArkCtx c;
  c.p = p;
  c.processor = blockIdx.x;
  c.iteration = p->first;
  ark_report(c, ARK_NO_TASK, 9u, 0u, ARK_SHARED_ALIGNMENT, begin);
}

extern "C" __global__ void __launch_bounds__(ARK_BLOCK_THREADS, 1)
    ark_loop(const __grid_constant__ ArkParams params) {
  // Task bodies read the kernel's parameters through a pointer. The parameters are copied to shared
  // memory, which has the lowest latency.
  ArkParams& shared_params = ark_static_at<ArkParams, 0, 176>();
  // The address is stored to shared memory and loaded again before its alignment is tested.
  // Otherwise the compiler, which relies on the declared alignment, would replace the test by a
  // constant.
  volatile ark_u32& begin = ark_static_at<volatile ark_u32, 176, 192>();
  if (threadIdx.x == 0) {
    shared_params = params;
    begin = static_cast<ark_u32>(__cvta_generic_to_shared(ark_shared));
  }
  __syncthreads();
  const ark_u32 begins = begin;
  if (begins % ARK_SHARED_ALIGNMENT != 0u) {
    if (threadIdx.x == 0) ark_report_misaligned(&shared_params, begins);
    return;
  }
#ifdef ARK_HAS_RING
#ifdef ARK_HAS_HANDSHAKE
  if (threadIdx.x == 0) ark_handshake_init(&shared_params, blockIdx.x, ark_shared + ARK_RING_BYTES);
#endif
  ark_stream_open();
  if (ark_warp() == ARK_BLOCK_WARPS - 1) {
    ark_stream_run(&shared_params, blockIdx.x);
    return;
  }
#ifdef ARK_HAS_HANDSHAKE
  if (ark_warp() == ARK_WARPS) {
    ark_lead(&shared_params, blockIdx.x, ark_shared + ARK_RING_BYTES);
    return;
  }
  ark_follow(ark_shared + ARK_RING_BYTES);
#else
  ark_run(&shared_params, blockIdx.x, ark_shared + ARK_RING_BYTES);
#endif
  ark_stream_close();
#elif defined(ARK_HAS_LOADER)
#if defined(ARK_MOVERS)
  if (threadIdx.x == 0) ark_movers_open(&shared_params);
#endif
  ark_matrix_open();
  if (ark_warp() >= ARK_WARPS) {
    ark_matrix_loads_only();
    if (threadIdx.x == 32 * ARK_WARPS) ark_matrix_run(&shared_params, blockIdx.x, ark_shared);
#if defined(ARK_MOVERS)
    if (ark_warp() > ARK_WARPS) ark_move_run(&shared_params);
#elif !defined(ARK_HAS_TENSOR_MEMORY)
    if (ARK_MATRIX_AHEAD > 0u && threadIdx.x == 32 * (ARK_WARPS + 1)) {
      ark_matrix_prefetch_run(&shared_params, blockIdx.x, ark_shared);
    }
#endif
    return;
  }
  ark_matrix_computes();
  ark_run(&shared_params, blockIdx.x, ark_shared);
  ark_matrix_close();
#else
  ark_run(&shared_params, blockIdx.x, ark_shared);
#endif
}
