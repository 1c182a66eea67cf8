// The loop kernel's entry point on AMD GPUs: one workgroup per processor. Its shared memory is
// given at launch; the parameters are read in place, as the hardware hands them over.

extern __attribute__((device, shared, aligned(16))) char ark_lds[];

extern "C" __attribute__((global, amdgpu_flat_work_group_size(ARK_THREADS, ARK_THREADS))) void
ark_loop(ArkParams) {
  const void* params = (const void*)__builtin_amdgcn_kernarg_segment_ptr();
  ark_run(static_cast<const ArkParams*>(params), __builtin_amdgcn_workgroup_id_x(), ark_lds);
}
