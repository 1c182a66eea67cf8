// Handlers of 64-bit integer operations: products of 32 by 32 bits with a sum, shifts, and moves.
#include "lanes.h"
#include "ops.h"

namespace ark_emu {
namespace {

using U32 = uint32_t;
using I32 = int32_t;
using U64 = uint64_t;
using I64 = int64_t;

template <bool Signed>
void mad_64_32(Wave& w, const Inst& i) {
  alignas(64) Row2 t0, t1, t2, out;
  alignas(64) Row carry;
  const U32 *a = w.src32(i, 0, t0), *b = w.src32(i, 1, t1), *c = w.src64(i, 2, t2);
  const bool clamps = i.clamp;
  each_lane(w, [&](int l) {
    const U64 product = Signed ? static_cast<U64>(I64(I32(a[l])) * I32(b[l])) : U64(a[l]) * b[l];
    const U64 addend = join(c[l], c[kLanes + l]), sum = product + addend;
    // Bit 64 of the exact sum: the carry if unsigned, the sign if signed.
    const bool overflow = Signed ? ((~(product ^ addend) & (product ^ sum)) >> 63) != 0
                                 : sum < product;
    const bool bit64 = Signed ? overflow != ((sum >> 63) != 0) : overflow;
    const U64 limit = Signed ? U64(INT64_MAX) + (bit64 ? 1 : 0) : ~0ull;
    split(clamps && overflow ? limit : sum, out, l);
    carry[l] = bit64 ? ~0u : 0;
  });
  w.put64(i, out);
  w.put_mask(i, 1, row_bits(carry, w.lanes));
}

// Multiplies the even and the odd lanes of a row separately, because the host's instruction
// multiplies 32-bit words to 64-bit products. Compilers do not find this: from a plain loop they
// generate 64-bit by 64-bit multiplications.
#if defined(__AVX512F__)
#define ARK_WIDE_PRODUCTS 1
using Words = __m512i;
constexpr int kWords = 16;
constexpr __mmask8 kAll = 0xff;       // without a mask, GCC warns about uninitialised values
constexpr __mmask16 kOdd = 0xaaaa;
Words load_words(const U32* from) { return _mm512_loadu_si512(from); }
void store_words(U32* to, Words words) { _mm512_storeu_si512(to, words); }
Words same_words(U32 value) { return _mm512_set1_epi32(static_cast<int>(value)); }
Words product(Words a, Words b) { return _mm512_maskz_mul_epu32(kAll, a, b); }
Words sum(Words a, Words b) { return _mm512_add_epi32(a, b); }
Words high_words(Words a) { return _mm512_maskz_srli_epi64(kAll, a, 32); }
Words to_high(Words a) { return _mm512_maskz_slli_epi64(kAll, a, 32); }
Words even_odd(Words even, Words odd) { return _mm512_mask_blend_epi32(kOdd, even, odd); }
// For each word, ~0 if the addition with the result `total` did not carry, otherwise 0.
Words not_carried(Words a, Words total) {
  return _mm512_maskz_set1_epi32(_mm512_cmple_epu32_mask(a, total), -1);
}
U64 bits_not_carried(Words a, Words total) { return _mm512_cmple_epu32_mask(a, total); }
#elif defined(__AVX2__)
#define ARK_WIDE_PRODUCTS 1
using Words = __m256i;
constexpr int kWords = 8;
Words load_words(const U32* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
void store_words(U32* to, Words words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}
Words same_words(U32 value) { return _mm256_set1_epi32(static_cast<int>(value)); }
Words product(Words a, Words b) { return _mm256_mul_epu32(a, b); }
Words sum(Words a, Words b) { return _mm256_add_epi32(a, b); }
Words high_words(Words a) { return _mm256_srli_epi64(a, 32); }
Words to_high(Words a) { return _mm256_slli_epi64(a, 32); }
Words even_odd(Words even, Words odd) { return _mm256_blend_epi32(even, odd, 0xaa); }
// For each word, ~0 if the addition with the result `total` did not carry, otherwise 0.
Words not_carried(Words a, Words total) {
  return _mm256_cmpeq_epi32(_mm256_max_epu32(a, total), total);
}
U64 bits_not_carried(Words a, Words total) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(not_carried(a, total))));
}
#endif

#if defined(ARK_WIDE_PRODUCTS)
// v_mad_u64_u32, without modifiers; source 0 or 1 may be the same in all lanes.
template <unsigned kUniform>
void mad_u64_u32(Wave& w, const Inst& i) {
  const Source<(kUniform & 1) != 0> a(w, i.src[0]);
  const Source<(kUniform & 2) != 0> b(w, i.src[1]);
  const U32* c = w.row(i.src[2].reg);
  U32* to = w.row(i.dst[0].reg);
  const auto words = [](const auto& source, int l) {
    if constexpr (std::is_same_v<decltype(source), const Source<true>&>) {
      return same_words(source.value);
    } else {
      return load_words(source.row + l);
    }
  };
  const int lanes = w.lanes;
  const Words one = same_words(1);
  U64 within = 0;   // lanes without a carry out of 64 bits
  for (int l = 0; l < lanes; l += kWords) {
    const Words x = words(a, l), y = words(b, l);
    const Words addend_low = load_words(c + l), addend_high = load_words(c + kLanes + l);
    const Words even = product(x, y), odd = product(high_words(x), high_words(y));
    const Words low = even_odd(even, to_high(odd)), high = even_odd(high_words(even), odd);
    const Words sum_low = sum(low, addend_low);
    // Adds the carries of the low halves: one in all lanes, and then the mask, which is -1 in lanes
    // without a carry. A product's high half is at most 2^32 - 2, so adding one does not overflow.
    const Words with_carry = sum(sum(high, one), not_carried(low, sum_low));
    const Words sum_high = sum(with_carry, addend_high);
    store_words(to + l, sum_low);
    store_words(to + kLanes + l, sum_high);
    within |= bits_not_carried(with_carry, sum_high) << l;
  }
  w.put_mask(i, 1, ~within);
}
#endif

// A source that has 64 bits per lane: a row of low dwords and a row of high dwords.
template <bool kUniform>
struct WideSource {
  const U32* row;
  WideSource(Wave& w, const Operand& operand) : row(w.row(operand.reg)) {}
  U32 low(int lane) const { return row[lane]; }
  U32 high(int lane) const { return row[kLanes + lane]; }
};
template <>
struct WideSource<true> {
  U64 value;
  WideSource(const Wave& w, const Operand& operand) : value(w.scalar64(operand)) {}
  U32 low(int) const { return static_cast<U32>(value); }
  U32 high(int) const { return static_cast<U32>(value >> 32); }
};

// v_lshl_add_u64, which computes addresses, in parts of 32 bits.
template <unsigned kUniform>
void lshl_add_u64(Wave& w, const Inst& i) {
  const WideSource<(kUniform & 1) != 0> a(w, i.src[0]);
  const Source<(kUniform & 2) != 0> shift(w, i.src[1]);
  const WideSource<(kUniform & 4) != 0> c(w, i.src[2]);
  U32* to = w.row(i.dst[0].reg);
  whole_lanes(w, [=](int l) {
    const U32 by = shift[l] & 7, low = a.low(l) << by;
    const U32 high = a.high(l) << by | a.low(l) >> 1 >> (31 - by);
    const U32 total = low + c.low(l);
    const U32 high_total = high + c.high(l) + (total < low ? 1 : 0);
    to[l] = total;
    to[kLanes + l] = high_total;
  });
}

template <unsigned kUniform>
void mov_b64(Wave& w, const Inst& i) {
  const WideSource<kUniform != 0> a(w, i.src[0]);
  U32* to = w.row(i.dst[0].reg);
  whole_lanes(w, [=](int l) {
    const U32 low = a.low(l), high = a.high(l);
    to[l] = low;
    to[kLanes + l] = high;
  });
}

}  // namespace

void register_valu_wide(Ops& ops) {
  Handlers mad = mad_64_32<false>;
#if defined(ARK_WIDE_PRODUCTS)
  mad.whole = {mad_u64_u32<0>, mad_u64_u32<1>, mad_u64_u32<2>, mad_u64_u32<3>};
#endif
  ops.add("v_mad_u64_u32", "u64,m=u32,u32,u64", mad);
  ops.add("v_mad_i64_i32", "i64,m=i32,i32,i64", mad_64_32<true>);
  Handlers move = wide1([](U64 a) { return a; });
  move.whole = {mov_b64<0>, mov_b64<1>};
  ops.add("v_mov_b64", "b64=b64", move);
  ops.add("v_lshlrev_b64", "b64=u32,b64", wide2([](U64 a, U64 b) { return b << (a & 63); }));
  ops.add("v_lshrrev_b64", "b64=u32,b64", wide2([](U64 a, U64 b) { return b >> (a & 63); }));
  ops.add("v_ashrrev_i64", "i64=u32,i64",
          wide2([](U64 a, U64 b) { return static_cast<U64>(I64(b) >> (a & 63)); }));
  Handlers shift_add = wide3([](U64 a, U64 b, U64 c) { return (a << (b & 7)) + c; });
  shift_add.whole = {lshl_add_u64<0>, nullptr, lshl_add_u64<2>, lshl_add_u64<3>,
                     nullptr, nullptr, lshl_add_u64<6>};
  ops.add("v_lshl_add_u64", "u64=u64,u32,u64", shift_add);
}

}  // namespace ark_emu
