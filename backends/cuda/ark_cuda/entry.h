// The loop kernel's entry point on NVIDIA GPUs: one block per processor, all resident, launched
// cooperatively. With a ring the last warp fetches; with roles the one before leads, the others
// compute.

constexpr int ARK_BLOCK_THREADS = 32 * ARK_BLOCK_WARPS;

extern "C" __global__ void __launch_bounds__(ARK_BLOCK_THREADS, 1)
    ark_loop(const __grid_constant__ ArkParams params) {
  // Task bodies reach the parameters through a pointer: shared memory answers fastest.
  __shared__ ArkParams shared_params;
  if (threadIdx.x == 0) shared_params = params;
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
#endif
    return;
  }
  ark_matrix_computes();
  ark_run(&shared_params, blockIdx.x, ark_shared);
  ark_matrix_close();
#else
  __syncthreads();
  ark_run(&shared_params, blockIdx.x, ark_shared);
#endif
}
