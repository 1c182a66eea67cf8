// The loop kernel's entry point on AMD GPUs: one workgroup per processor. Its shared memory is
// given at launch; the parameters are read in place, as the hardware hands them over.

extern "C" __attribute__((global, amdgpu_flat_work_group_size(ARK_THREADS, ARK_THREADS))) void
ark_loop(ArkParams) {
  const auto* params = static_cast<const ArkParams*>(ark_kernel_params());
  ark_run(params, __builtin_amdgcn_workgroup_id_x(), ark_lds);
}
