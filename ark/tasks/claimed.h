// Tiles that tasks claim at run time from an atomic counter (dynamic scheduling), instead of having
// fixed tiles.

// The coordinates of tiles: N0 to N3 tiles in four dimensions, at distances of S0 to S3 indices.
// Tiles are numbered with the last dimension fastest.
template <int N0, int N1, int N2, int N3, int S0, int S1, int S2, int S3>
struct ArkPlaces {
  static constexpr ark_u32 TILES = static_cast<ark_u32>(N0 * N1 * N2 * N3);
  // Called by one thread: writes the coordinates of tile `number` into a task's record. If there is
  // no such tile, it marks the record as the end.
  ARK_DEVICE void put(ArkTask& record, ark_u32 number) {
    if (number >= TILES) record.kind = ARK_NO_TASK;
    const int n = static_cast<int>(number);
    record.coord[3] = n % N3 * S3;
    record.coord[2] = n / N3 % N2 * S2;
    record.coord[1] = n / (N3 * N2) % N1 * S1;
    record.coord[0] = n / (N3 * N2 * N1) * S0;
  }
};

// Claims tiles for a task at run time, by all its threads. The atomic counter's address follows the
// operands in the task's record. In an iteration, each of the TASKS tasks begins with one fixed
// tile, and together they claim the other TILES - TASKS tiles. At its end each task also claims one
// number that belongs to no tile. So the counter grows by TILES per iteration. RECORDS: the offset
// in shared memory at which two task records are stored.
template <class PLACES, int TASKS, int OPERANDS, int RECORDS>
struct ArkClaims {
  ArkTask* records;
  ark_u32* counter;
  ark_u32 before;  // the counter's value for tile 0
  ARK_DEVICE ArkClaims begin(ArkCtx& c, const ArkTask& t) {
    ArkTask* const own = reinterpret_cast<ArkTask*>(ARK_SCRATCH(c) + RECORDS);
    constexpr int WORDS = static_cast<int>(sizeof(ArkTask) / 8u);
    for (int w = ark_tid(); w < 2 * WORDS; w += ARK_THREADS) {
      reinterpret_cast<ark_u64*>(own)[w] = reinterpret_cast<const ark_u64*>(&t)[w % WORDS];
    }
    ark_sync();
    return {own, ark_words(t.operand[OPERANDS]),
            PLACES::TILES * c.phase_iteration - static_cast<ark_u32>(TASKS)};
  }
  // Claims the next tile. Returns its number in thread 0, and 0 in all other threads.
  ARK_DEVICE ark_u32 ask(const ArkClaims& s) {
    return ark_tid() == 0 ? ark_claim(s.counter) - s.before : 0u;
  }
  // Called by all threads: writes a task record for the tile with this number to slot `turn` of the
  // two records in shared memory, and returns the record.
  ARK_DEVICE const ArkTask& tell(const ArkClaims& s, ark_u32 turn, ark_u32 number) {
    if (ark_tid() == 0) PLACES::put(s.records[turn], number);
    ark_sync();
    return s.records[turn];
  }
};

// Calls body(record) for the task's own tile, and then for further tiles that no other task has
// claimed, until none is left. The next tile's number is fetched while the current tile is
// computed.
template <class PLACES, int TASKS, int OPERANDS, int RECORDS, class Body>
ARK_DEVICE void ark_claimed(ArkCtx& c, const ArkTask& t, const Body& body) {
  typedef ArkClaims<PLACES, TASKS, OPERANDS, RECORDS> Claims;
  const Claims claims = Claims::begin(c, t);
  const ArkTask* tile = &t;
  for (ark_u32 turn = 0u; tile->kind != ARK_NO_TASK; turn ^= 1u) {
    const ark_u32 next = Claims::ask(claims);
    body(*tile);
    tile = &Claims::tell(claims, turn, next);
  }
}

// Like ark_claimed, but a task loads its next tile while it computes the current one. The registers
// of a thread must hold the operands of two tiles (HELD). load(held, record) loads a tile;
// finish(held) computes a loaded tile.
template <class HELD, class PLACES, int TASKS, int OPERANDS, int RECORDS, class Load, class Finish>
ARK_DEVICE void ark_claimed_ahead(ArkCtx& c, const ArkTask& t, const Load& load,
                                  const Finish& finish) {
  typedef ArkClaims<PLACES, TASKS, OPERANDS, RECORDS> Claims;
  HELD first = {}, second = {};
  load(first, t);
  const Claims claims = Claims::begin(c, t);
  // Computes the tile in `now` while the next tile is loaded into `ahead`. Returns true if there is
  // a next tile.
  const auto turned = [&](HELD& now, HELD& ahead, ark_u32 turn) {
    const ArkTask& tile = claims.records[turn];
    const bool more = tile.kind != ARK_NO_TASK;
    const ark_u32 next = more ? Claims::ask(claims) : 0u;
    if (more) load(ahead, tile);
    finish(now);
    if (more) Claims::tell(claims, turn ^ 1u, next);
    return more;
  };
  Claims::tell(claims, 0u, Claims::ask(claims));
  while (turned(first, second, 0u) && turned(second, first, 1u)) {
  }
}
