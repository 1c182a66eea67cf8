// Names and descriptions of HIP's error codes.
#include "runtime.h"

namespace {

struct Entry {
  hipError_t code;
  const char *name, *words;
};
#define ENTRY(CODE, WORDS) {CODE, #CODE, WORDS}
const Entry kErrors[] = {
    ENTRY(hipSuccess, "no error"),
    ENTRY(hipErrorInvalidValue, "invalid argument"),
    ENTRY(hipErrorOutOfMemory, "out of memory"),
    ENTRY(hipErrorNotInitialized, "initialization error"),
    ENTRY(hipErrorInvalidConfiguration, "invalid configuration argument"),
    ENTRY(hipErrorInvalidSymbol, "invalid device symbol"),
    ENTRY(hipErrorInvalidDevicePointer, "invalid device pointer"),
    ENTRY(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ENTRY(hipErrorInvalidDeviceFunction, "invalid device function"),
    ENTRY(hipErrorNoDevice, "no ROCm-capable device is detected"),
    ENTRY(hipErrorInvalidDevice, "invalid device ordinal"),
    ENTRY(hipErrorInvalidImage, "device kernel image is invalid"),
    ENTRY(hipErrorInvalidContext, "invalid device context"),
    ENTRY(hipErrorMapFailed, "mapping of buffer object failed"),
    ENTRY(hipErrorNoBinaryForGpu, "no kernel image is available for execution on the device"),
    ENTRY(hipErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    ENTRY(hipErrorFileNotFound, "file not found"),
    ENTRY(hipErrorOperatingSystem, "OS call failed or operation not supported on this OS"),
    ENTRY(hipErrorInvalidHandle, "invalid resource handle"),
    ENTRY(hipErrorIllegalState, "the operation cannot be performed in the present state"),
    ENTRY(hipErrorNotFound, "named symbol not found"),
    ENTRY(hipErrorNotReady, "device not ready"),
    ENTRY(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    ENTRY(hipErrorLaunchOutOfResources, "too many resources requested for launch"),
    ENTRY(hipErrorLaunchTimeOut, "the launch timed out and was terminated"),
    ENTRY(hipErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ENTRY(hipErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    ENTRY(hipErrorAssert, "device-side assert triggered"),
    ENTRY(hipErrorHostMemoryAlreadyRegistered,
          "part or all of the requested memory range is already mapped"),
    ENTRY(hipErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region"),
    ENTRY(hipErrorLaunchFailure, "unspecified launch failure"),
    ENTRY(hipErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    ENTRY(hipErrorNotSupported, "operation not supported"),
    ENTRY(hipErrorUnknown, "unknown error"),
};
#undef ENTRY

const Entry& entry(hipError_t code) {
  for (const Entry& known : kErrors)
    if (known.code == code) return known;
  return kErrors[std::size(kErrors) - 1];
}

}  // namespace

HIP_EXPORT const char* hipGetErrorName(hipError_t code) { return entry(code).name; }
HIP_EXPORT const char* hipGetErrorString(hipError_t code) { return entry(code).words; }
HIP_EXPORT hipError_t hipDrvGetErrorName(hipError_t code, const char** text) {
  if (!text) return hipErrorInvalidValue;
  *text = entry(code).name;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDrvGetErrorString(hipError_t code, const char** text) {
  if (!text) return hipErrorInvalidValue;
  *text = entry(code).words;
  return hipSuccess;
}
