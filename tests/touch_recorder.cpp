// Records which bytes of a region instrumented code reads and writes. The code is compiled with
// -fsanitize=thread, which calls a function before every access. These functions are defined here
// instead of in the sanitizer's runtime; this file itself is compiled without the option. Only one
// thread may run at a time.
#include <cstddef>
#include <cstdint>

namespace {

constexpr unsigned char READ = 1, WRITTEN = 2;
uintptr_t region = 0;
size_t region_bytes = 0;
unsigned char* marks = nullptr;

// A read of bytes that the same code wrote before is not recorded.
void note(const volatile void* address, size_t bytes, bool write) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(address) - region;
  for (uintptr_t at = first; at < first + bytes; ++at) {
    if (at >= region_bytes) continue;
    if (write) {
      marks[at] |= WRITTEN;
    } else if (!(marks[at] & WRITTEN)) {
      marks[at] |= READ;
    }
  }
}

}  // namespace

extern "C" {

void touch_record(void* begin, size_t bytes, unsigned char* into) {
  region = reinterpret_cast<uintptr_t>(begin);
  region_bytes = bytes;
  marks = into;
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* p, size_t n) { note(p, n, false); }
void __tsan_write_range(void* p, size_t n) { note(p, n, true); }

#define PLAIN(N)                                                   \
  void __tsan_read##N(void* p) { note(p, N, false); }              \
  void __tsan_write##N(void* p) { note(p, N, true); }              \
  void __tsan_unaligned_read##N(void* p) { note(p, N, false); }    \
  void __tsan_unaligned_write##N(void* p) { note(p, N, true); }    \
  void __tsan_volatile_read##N(void* p) { note(p, N, false); }     \
  void __tsan_volatile_write##N(void* p) { note(p, N, true); }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)

// The compiler replaces an atomic operation by a call, so these functions also perform the
// operation.
#define ATOMIC(BITS)                                                                             \
  uint##BITS##_t __tsan_atomic##BITS##_load(const volatile uint##BITS##_t* p, int) {             \
    note(p, BITS / 8, false);                                                                    \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                              \
  void __tsan_atomic##BITS##_store(volatile uint##BITS##_t* p, uint##BITS##_t v, int) {          \
    note(p, BITS / 8, true);                                                                     \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                              \
  uint##BITS##_t __tsan_atomic##BITS##_exchange(volatile uint##BITS##_t* p, uint##BITS##_t v,    \
                                                int) {                                           \
    note(p, BITS / 8, false);                                                                    \
    note(p, BITS / 8, true);                                                                     \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                          \
  }                                                                                              \
  uint##BITS##_t __tsan_atomic##BITS##_fetch_add(volatile uint##BITS##_t* p, uint##BITS##_t v,   \
                                                 int) {                                          \
    note(p, BITS / 8, false);                                                                    \
    note(p, BITS / 8, true);                                                                     \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                           \
  }                                                                                              \
  int __tsan_atomic##BITS##_compare_exchange_strong(                                             \
      volatile uint##BITS##_t* p, uint##BITS##_t* expected, uint##BITS##_t v, int, int) {        \
    note(p, BITS / 8, false);                                                                    \
    note(p, BITS / 8, true);                                                                     \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST,                  \
                                       __ATOMIC_SEQ_CST);                                        \
  }                                                                                              \
  uint##BITS##_t __tsan_atomic##BITS##_compare_exchange_val(                                     \
      volatile uint##BITS##_t* p, uint##BITS##_t expected, uint##BITS##_t v, int, int) {         \
    __tsan_atomic##BITS##_compare_exchange_strong(p, &expected, v, 0, 0);                        \
    return expected;                                                                             \
  }
ATOMIC(32) ATOMIC(64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
