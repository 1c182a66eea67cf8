// Simulates a warp on the host, so that device code can run there: 32 threads, one for each lane,
// which synchronise where lanes exchange values. Also simulates the product of matrix units. Used
// by tests/codegen.
#include <array>
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>
#define ARK_DEVICE static inline
#define ARK_DEVICE_MEMBER inline
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Half {
  uint16_t bits;
};
static thread_local int lane;
static std::barrier<> together(32);
static int ark_lane() { return lane; }
static float value(uint32_t bits) {
  float v;
  bits <<= 16;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
static float shown[32];
static float __shfl_sync(unsigned, float v, int from) {
  together.arrive_and_wait();
  shown[lane] = v;
  together.arrive_and_wait();
  return shown[from];
}
static float ark_shfl_xor(float v, int mask) { return __shfl_sync(0u, v, lane ^ mask); }
static uint32_t operands[32][6];
// d += a b for a 16 by 16 and a 16 by 8 tile. Each lane passes its own registers: four of a, two of
// b (PTX, mma.m16n8k16).
static void multiply_tile(float (&d)[4], const std::array<uint32_t, 6>& own) {
  together.arrive_and_wait();
  for (int i = 0; i < 6; ++i) operands[lane][i] = own[i];
  together.arrive_and_wait();
  const auto half = [](uint32_t word, int k) { return value(k % 2 ? word >> 16 : word & 0xffffu); };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = operands[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t b = operands[column * 4 + k % 8 / 2][4 + k / 8];
      d[e] += half(a, k) * half(b, k);
    }
  }
}
