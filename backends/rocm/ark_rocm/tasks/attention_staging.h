// Copies keys and values from memory to shared memory, one block of keys at a time. Used by
// attention of tiles of queries on matrix units. The layout in shared memory is that of
// ArkAttentionUnits (attention_units.h).

// One head of a tile's keys or values in memory: its address and strides. EVEN: true if all keys
// have the same distance. The address of a block can then be scalar, and a lane's offset is the
// same in all blocks.
template <class S, class K>
struct ArkAttentionHead {
  static constexpr bool EVEN = true;
  ark_u64 base;
  ark_u32 step;  // bytes from one key to the next
  ARK_METHOD void begin(K keys, const ArkAttentionTile& tile) {
    const auto* row = ark_attention_row<S>(keys, tile.batch, tile.head / S::PER_KV, 0);
    base = ark_uniform(reinterpret_cast<ark_u64>(row));
    const auto* next = ark_attention_row<S>(keys, tile.batch, tile.head / S::PER_KV, 1);
    step = static_cast<ark_u32>(ark_uniform(reinterpret_cast<ark_u64>(next)) - base);
  }
  template <typename W>
  ARK_METHOD W load(const ArkAttentionTile&, int key, int element) const {
    return *(const ark_global<W>*)((const ark_global<char>*)base + offset(key, element));
  }
  ARK_METHOD ark_u32 offset(int key, int element) const {
    return static_cast<ark_u32>(key) * step + static_cast<ark_u32>(element) * 2u;
  }
  ARK_METHOD ark_u64 at(int key) const {
    return base + static_cast<ark_u64>(static_cast<ark_u32>(key)) * step;
  }
};
template <class S, int PAGE, int POOL, class X, class T>
struct ArkAttentionHead<S, ArkPaged<PAGE, POOL, X, T>> {
  static constexpr bool EVEN = false;
  ArkPaged<PAGE, POOL, X, T> operand;
  ARK_METHOD void begin(const ArkPaged<PAGE, POOL, X, T>& keys, const ArkAttentionTile&) {
    operand = keys;
  }
  template <typename W>
  ARK_METHOD W load(const ArkAttentionTile& tile, int key, int element) const {
    const auto* row = ark_attention_row<S>(operand, tile.batch, tile.head / S::PER_KV, key);
    return *(const ark_global<W>*)(row + element);
  }
};

// Copies the keys of a block from memory to registers and from there to shared memory.
template <class U, class S>
struct ArkAttentionKeys {
  static constexpr int TOTAL = U::ALL * U::PIECES;
  static constexpr int MINE = (TOTAL + ARK_THREADS - 1) / ARK_THREADS;
  ark_u32x4 loads[MINE];
  ark_u32 offsets[MINE];  // of the loads of fetch_whole, from the block's first key

  // Loads the keys of a block from key `first` on. Masked keys are replaced by the last visible
  // key.
  template <class H>
  ARK_METHOD void fetch(const H& head, const ArkAttentionTile& tile, int tid, int first) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS, piece = n % U::PIECES;
      if (TOTAL % ARK_THREADS != 0 && n >= TOTAL) continue;
      loads[i] = 0u;
      if (U::WIDTH % 16 != 0 && 8 * piece >= U::WIDTH) continue;
      const int key = first + n / U::PIECES, last = tile.end - 1;
      loads[i] = head.template load<ark_u32x4>(tile, key < last ? key : last, 8 * piece);
    }
  }
  // Loads a block whose keys all exist. from: the address of its first key. It takes no vector
  // instructions to find the keys.
  template <class H>
  ARK_METHOD void begin_whole(const H& head, int tid) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS;
      offsets[i] = head.offset(n / U::PIECES, n % U::PIECES * 8);
    }
  }
  ARK_METHOD void fetch_whole(ark_u64 from) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      asm volatile("" : "+v"(offsets[i]));  // keeps it in a register of 32 bits
      loads[i] = *(const ark_global<ark_u32x4>*)((const ark_global<char>*)from + offsets[i]);
    }
  }
  ARK_METHOD void place(ark_local* shared, int tid) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS, key = n / U::PIECES;
      if (TOTAL % ARK_THREADS != 0 && n >= TOTAL) continue;
      const int slot = key / ARK_UNIT * ARK_UNIT + ark_unit_slot(key % ARK_UNIT);
      *(ark_in_local<ark_u32x4>*)(shared + (n % U::PIECES * U::PITCH + slot) * 16) = loads[i];
    }
  }
};

// Copies the values of a block of keys and transposes them. A thread loads four elements of the
// values of four keys. Eight neighbouring threads load neighbouring elements; the next eight
// threads load the same elements for the next four keys. The eight keys of two such groups of
// threads form a piece in shared memory.
template <class U, class S>
struct ArkAttentionValues {
  static constexpr int EIGHTS = (U::WIDTH + 31) / 32, TOTAL = U::ALL / 8 * 16 * EIGHTS;
  static constexpr int MINE = (TOTAL + ARK_THREADS - 1) / ARK_THREADS;
  ark_u32x2 loads[MINE][4];
  ark_u32 offsets[MINE];  // as in ArkAttentionKeys, of the first of the four keys

  ARK_METHOD static int four(int n) { return n % 8 + n / 16 % EIGHTS * 8; }
  ARK_METHOD static int half(int n) { return n / 8 % 2; }
  ARK_METHOD static int piece(int n) { return n / (16 * EIGHTS); }
  ARK_METHOD static int key(int n) { return piece(n) / 2 * 16 + half(n) * 8 + piece(n) % 2 * 4; }
  ARK_METHOD static bool there(int n) {
    return (TOTAL % ARK_THREADS == 0 || n < TOTAL) &&
           (U::WIDTH % 32 == 0 || 4 * four(n) < U::WIDTH);
  }
  template <class H>
  ARK_METHOD void fetch(const H& head, const ArkAttentionTile& tile, int tid, int first) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS, last = tile.end - 1;
      if (!there(n)) continue;
      const int own = first + key(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = own + e < last ? own + e : last;
        loads[i][e] = head.template load<ark_u32x2>(tile, at, 4 * four(n));
      }
    }
  }
  template <class H>
  ARK_METHOD void begin_whole(const H& head, int tid) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS;
      offsets[i] = head.offset(key(n), 4 * four(n));
    }
  }
  ARK_METHOD void fetch_whole(ark_u64 from, ark_u32 step) {
#pragma unroll
    for (int e = 0; e < 4; ++e, from += step) {
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        asm volatile("" : "+v"(offsets[i]));
        loads[i][e] = *(const ark_global<ark_u32x2>*)((const ark_global<char>*)from + offsets[i]);
      }
    }
  }
  ARK_METHOD void place(ark_local* shared, int tid) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int n = tid + i * ARK_THREADS;
      if (!there(n)) continue;
      ark_local* to = shared + U::VALUES + (piece(n) * U::WIDE + four(n)) * 16 + half(n) * 8;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        ark_u32x2 turned;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          turned[e] = __builtin_amdgcn_perm(loads[i][2 * e + 1][d / 2], loads[i][2 * e][d / 2],
                                            d % 2 == 0 ? 0x05040100u : 0x07060302u);
        }
        *(ark_in_local<ark_u32x2>*)(to + U::slot(d) * 16) = turned;
      }
    }
  }
};
