// The loop kernel's entry point on NVIDIA GPUs: one block per processor, all resident, launched
// cooperatively. With a ring the last warp fetches, the others compute.

constexpr int ARK_BLOCK_THREADS = ARK_THREADS + (ARK_RING_BYTES > 0 ? 32 : 0);

extern "C" __global__ void __launch_bounds__(ARK_BLOCK_THREADS, 1)
    ark_loop(const __grid_constant__ ArkParams params) {
  // Task bodies reach the parameters through a pointer: shared memory answers fastest.
  __shared__ ArkParams shared_params;
  if (threadIdx.x == 0) shared_params = params;
#ifdef ARK_HAS_RING
  ark_stream_open();
  if (ark_tid() >= ARK_THREADS) {
    ark_stream_run(&shared_params, blockIdx.x);
    return;
  }
  ark_run(&shared_params, blockIdx.x, ark_shared + ARK_RING_BYTES);
  ark_stream_close();
#else
  __syncthreads();
  ark_run(&shared_params, blockIdx.x, ark_shared);
#endif
}
