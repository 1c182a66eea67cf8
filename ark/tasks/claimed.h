// Tiles that processors claim at run time.

// The coordinates of tiles: N0 to N3 tiles in four dimensions, at distances of S0 to S3 indices.
// Tiles are numbered with the last dimension fastest.
template <int N0, int N1, int N2, int N3, int S0, int S1, int S2, int S3>
struct ArkPlaces {
  static constexpr ark_u32 TILES = static_cast<ark_u32>(N0 * N1 * N2 * N3);
  // Called by one thread: changes a task's record to that of tile `number`; after the last tile,
  // marks it as no task.
  ARK_DEVICE void put(ArkTask& record, ark_u32 number) {
    if (number >= TILES) record.kind = ARK_NO_TASK;
    const int n = static_cast<int>(number);
    record.coord[3] = n % N3 * S3;
    record.coord[2] = n / N3 % N2 * S2;
    record.coord[1] = n / (N3 * N2) % N1 * S1;
    record.coord[0] = n / (N3 * N2 * N1) * S0;
  }
};

// Calls body(record) for the task's own tile, and then for further tiles that no other task has
// claimed, until none is left. The next tile's number is fetched while the current tile is
// computed. The counter's address follows the operands in the record. In an iteration, each of the
// TASKS tasks has one tile of its own, claims TILES - TASKS others in all, and claims one number
// after the last tile. So the counter grows by TILES per iteration. RECORDS: the offset in shared
// memory of the memory for two records.
template <class PLACES, int TASKS, int OPERANDS, int RECORDS, class Body>
ARK_DEVICE void ark_claimed(ArkCtx& c, const ArkTask& t, const Body& body) {
  ArkTask* const own = reinterpret_cast<ArkTask*>(ARK_SCRATCH(c) + RECORDS);
  constexpr int WORDS = static_cast<int>(sizeof(ArkTask) / 8u);
  for (int w = ark_tid(); w < 2 * WORDS; w += ARK_THREADS) {
    reinterpret_cast<ark_u64*>(own)[w] = reinterpret_cast<const ark_u64*>(&t)[w % WORDS];
  }
  ark_sync();
  ark_u32* const counter = ark_words(t.operand[OPERANDS]);
  const ark_u32 before = PLACES::TILES * c.phase_iteration - static_cast<ark_u32>(TASKS);
  const ArkTask* tile = &t;
  for (ark_u32 turn = 0u; tile->kind != ARK_NO_TASK; turn ^= 1u) {
    ark_u32 next = 0u;
    if (ark_tid() == 0) next = ark_claim(counter) - before;
    body(*tile);
    if (ark_tid() == 0) PLACES::put(own[turn], next);
    ark_sync();
    tile = own + turn;
  }
}
