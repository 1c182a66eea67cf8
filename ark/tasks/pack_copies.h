// Asynchronous copies to shared memory. ark_copy_pack copies 16 bytes, or zeros if `here` is false.
// ark_copies_begun ends a group of copies. ark_copies_but<N> waits until all groups except the last
// N are complete; after a barrier all threads can read them. A backend without such copies uses the
// functions below, in which a copy is complete at once.
#ifndef ARK_HAS_COPY_PACK
#define ARK_HAS_COPY_PACK 1
ARK_DEVICE void ark_copies_begun() {}
template <int LEFT>
ARK_DEVICE void ark_copies_but() {}
template <typename T>
ARK_DEVICE void ark_copy_pack(T* to, const T* from, bool here) {
  constexpr int PACK = 16 / static_cast<int>(sizeof(T));
  const auto pack = ark_load_pack<PACK>(from);
  ark_store_pack<PACK>(to, here ? pack : decltype(pack){});
}
#endif
