// Softmax and norms of rows that are claimed at run time by an atomic counter (dynamic scheduling).

// The rounds of a team of warps, with the functions of ArkRounds (row_norm.h). A round is claimed
// two rounds before it is computed. Its rows are loaded one round before.
template <int R, int TEAM>
struct ArkClaimedRounds {
  int first, step;
  ark_u32* counter;
  ark_u32 before;  // the counter's value for the first claimed round of the iteration
  int* words;      // two words of the team, in shared memory
  bool leads;
  int number, turn;
  ARK_DEVICE void ask(ArkClaimedRounds& r) {
    if (r.leads) r.number = static_cast<int>(ark_claim(r.counter) - r.before) * R;
  }
  ARK_DEVICE void tell(ArkClaimedRounds& r) {
    if (r.leads) r.words[r.turn] = r.number;
    if (TEAM == 1) ark_warp_sync();
  }
  ARK_DEVICE int told(ArkClaimedRounds& r, int) {
    r.turn ^= 1;
    return r.words[r.turn ^ 1];
  }
};

// Processes rows that are claimed at run time. Each team of warps claims as many rows as it
// processes at a time. in(row), out(row): addresses of rows, numbered over all COUNT rows. If rows
// are not aligned for packs (vectors), the whole block claims rows instead of each team. Other
// constants: as for ark_row_norm and for ark_claimed (claimed.h).
template <class OP, int COUNT, int K, int SIDE, bool KEEP, int FOLDS, int V, int E, int EACH,
          int TEAM, int PART, int TASKS, int OPERANDS, int RECORDS, class In, class Out,
          class Weight>
ARK_DEVICE void ark_row_norm_claimed(ArkCtx& c, const ArkTask& t, const In& in, const Out& out,
                                     Weight weight, float eps, ark_u64 addresses) {
  constexpr int R = EACH * (ARK_LANES / PART);
  constexpr int TILES = (COUNT + R - 1) / R, TEAMS = ARK_WARPS / TEAM, STEP = TASKS * TEAMS;
  char* red = ARK_SCRATCH(c);
  if (V == 1 || ark_aligned(addresses)) {
    const int team = TEAMS == 1 ? 0 : ark_warp() / TEAM;
    const int first = t.coord[2] / R * TEAMS + team;
    const ark_u32 before = TILES * c.phase_iteration - 2u * STEP;
    ArkClaimedRounds<R, TEAM> rounds{first * R,
                                     STEP * R,
                                     ark_words(t.operand[OPERANDS]),
                                     before,
                                     reinterpret_cast<int*>(red + RECORDS) + 2 * team,
                                     ark_tid() == team * TEAM * ARK_LANES,
                                     0,
                                     0};
    ark_row_norm_held<OP, K, V, E, EACH, TEAM, PART>(in, out, weight, COUNT, eps, red, rounds);
    return;
  }
  if constexpr (V != 1) {
    ark_claimed<ArkPlaces<1, 1, TILES, 1, 1, 1, R, 1>, TASKS, OPERANDS, RECORDS>(
        c, t, [&](const ArkTask& tile) {
          const int begin = tile.coord[2], left = COUNT - begin;
          float* row = reinterpret_cast<float*>(red + FOLDS);
          ark_row_norm_any<OP, SIDE, KEEP, K>([&](int r) { return in(begin + r); },
                                              [&](int r) { return out(begin + r); }, weight,
                                              left < R ? left : R, eps, red, row);
        });
  }
}
