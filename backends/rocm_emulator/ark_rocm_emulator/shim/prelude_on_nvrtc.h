// Definitions that ark's ROCm prelude needs in addition to hip_on_nvrtc.h. The prelude contains AMD
// assembly: waits for stores, which are unnecessary here because of the fences beside them, and
// markers for the lint. Therefore `asm volatile(...)` is defined to be empty from here on. Other
// uses of `volatile` have no parenthesis after it and are unchanged.
#define asm
#define volatile(...) ((void)0)

// The address of a kernel's parameters. It is not used on NVIDIA, where the entry point receives
// the parameters by value.
#define __builtin_amdgcn_kernarg_segment_ptr() (static_cast<const void*>(nullptr))
#define __builtin_amdgcn_s_sendmsg_rtnl(MESSAGE) ark_global_time()

// The lane from which a lane reads when values move within rows of 16 lanes: quad_perm, row_mirror
// or row_half_mirror.
template <int CONTROL>
__device__ __forceinline__ int ark_row_source(int lane) {
  if (CONTROL < 0x100) return (lane & ~3) + ((CONTROL >> (2 * (lane & 3))) & 3);
  const int last = CONTROL == 0x141 ? 7 : 15;
  return (lane & ~last) + last - (lane & last);
}
#define __builtin_amdgcn_update_dpp(OLD, V, CONTROL, ROWS, BANKS, BOUND) \
  __shfl_sync(__activemask(), V, ark_row_source<CONTROL>(threadIdx.x & 31))
