// On CDNA, prefetches write register 252 (tasks/prefetch.h); the compiler uses only those before
// it.
#if defined(__GFX9__)
#define ARK_REGISTERS amdgpu_num_vgpr(252)
#else
#define ARK_REGISTERS amdgpu_num_vgpr(256)
#endif

// The loop kernel's entry point on AMD GPUs: one workgroup per processor. The launch sets the size
// of its shared memory. The parameters are read from the kernel argument segment without a copy.
extern "C" __attribute__((global, amdgpu_flat_work_group_size(ARK_THREADS, ARK_THREADS),
                          ARK_REGISTERS)) void
ark_loop(ArkParams) {
  if (ark_tid() == 0) {
    ark_waited = 0u;
    ark_prefetched = {};
    ark_asked_until = 0u;
    ark_signalled = {};
  }
  const auto* params = static_cast<const ArkParams*>(ark_kernel_params());
  ark_run(params, __builtin_amdgcn_workgroup_id_x(), ark_lds);
}
