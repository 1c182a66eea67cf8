// Sets the host's rounding and denormal controls while an instruction runs under a MODE that is not
// the default one.
#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ark_emu {

class FpMode {
 public:
  // wide: true to use MODE's fields for f64 and f16, false to use those for f32. On hosts other
  // than x86 only the rounding mode is set, and denormals are not flushed.
  FpMode(uint32_t mode, bool wide) {
    const unsigned round = (mode >> (wide ? 2 : 0)) & 3, denormals = (mode >> (wide ? 6 : 4)) & 3;
    if (round == 0 && denormals == 3) return;
    active_ = true;
#if defined(__x86_64__)
    constexpr unsigned kRound[4] = {0x0000, 0x4000, 0x2000, 0x6000};
    saved_ = _mm_getcsr();
    unsigned bits = (saved_ & ~0xe040u) | kRound[round];
    if ((denormals & 1) == 0) bits |= 0x0040;   // inputs
    if ((denormals & 2) == 0) bits |= 0x8000;   // results
    _mm_setcsr(bits);
#else
    constexpr int kRound[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    saved_ = static_cast<unsigned>(std::fegetround());
    std::fesetround(kRound[round]);
#endif
  }
  ~FpMode() {
    if (!active_) return;
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#else
    std::fesetround(static_cast<int>(saved_));
#endif
  }
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;

 private:
  bool active_ = false;
  unsigned saved_ = 0;
};

}  // namespace ark_emu
