"""The choice of each sequence's most likely token in the tasks that compute the logits of a batch.
The device code runs on the host: 32 threads are a warp's lanes. Results are compared with NumPy.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda.tasks import inline

from ark.tasks import text
from tests.cases.cuda_boxes import HOST
from tests.cases.cuda_tiles import HEAD

SIZES = [(4, 2), (8, 2), (8, 3), (8, 8), (16, 2), (16, 5), (16, 8)]
"""Rows of a stage and the number of sequences. Stages of four rows have whole rows."""
STAGES, TILES = 6, 2
CALLS = r"""
// All stages of one of the tasks, whose logits are given: row n of sequence m at m * width + n.
template <int R, int M>
static void draw(int task, int width, const float* given, int* settings, int* position,
                 float* made, float* candidates) {
  using Tile = typename ArkTileOf<(R <= 4), R, M>::Tile;
  ArkCtx c;
  const ArkTask t{{task * R * STAGES / TILES, 0}};
  auto e = ark_sample_rows<M, 7, R, TILES, STAGES>(Logits{made, width}, Operand<int>{settings},
                                                   Operand<int>{position},
                                                   Operand<float>{candidates});
  static float red[2 * M];
  ark_tile_begin<Tile>(e);
  const float scale[2] = {1.0f, 1.0f};
  for (int stage = 0; stage < STAGES / TILES; ++stage) {
    float sum[Tile::ALL] = {}, ahead[Tile::COLUMNS][1][2] = {};
    const int row = t.coord[0] + stage * R + Tile::row();
    for (int i = 0; i < Tile::ALL; ++i) {
      const int n = row + i / Tile::COLUMNS, m = Tile::column() + i % Tile::COLUMNS;
      if (m < M && n < width && Tile::row() < R) sum[i] = given[m * width + n];
    }
    ark_tile_store<Tile>(c, e, row, width, sum, scale, ahead);
  }
  ark_tile_finish<Tile>(t, e, red);
}
template <int R, int M, class... A>
static void warp(A... given) {
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; ++i) {
    lanes.emplace_back([=] {
      lane = i;
      draw<R, M>(given...);
    });
  }
  for (auto& each : lanes) each.join();
}
extern "C" void run(int r, int m, int task, int width, const float* given, int* settings,
                    int* position, float* made, float* candidates) {
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("tiles")
    source, library = folder / "tiles.cpp", folder / "tiles.so"
    words = "task, width, given, settings, position, made, candidates"
    calls = "".join(f"  if (r == {r} && m == {m}) warp<{r}, {m}>({words});\n" for r, m in SIZES)
    sizes = f"constexpr int STAGES = {STAGES}, TILES = {TILES};\n"
    device_code = text.header("sampling.h") + "".join(
        map(inline.header, ("linear_tiles.h", "linear_units.h", "linear_pair.h"))
    )
    source.write_text(HOST + HEAD + sizes + device_code + CALLS + calls + "}\n")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(("rows", "batch"), SIZES)
def test_best_token_of_each_sequence_is_found(
    device: ctypes.CDLL, rows: int, batch: int, hot: bool
) -> None:
    from ark.ops.tokens import _scores
    from ark.tasks.tokens import key_halves, noise_key

    width = rows * STAGES - 3
    rng = np.random.default_rng(rows + batch)
    given = rng.standard_normal((batch, width)).astype(np.float32)
    given[0, 1] = given[0, 5] = 9.0  # of equals the lower one
    temperatures = np.full(batch, 0.8 if hot else 0.0, np.float32)
    settings = np.zeros((batch, 7), np.int32)
    keys = [noise_key(7, m) for m in range(batch)]
    settings[:, 0], settings[:, [2, 6]] = temperatures.view(np.int32), list(map(key_halves, keys))
    position = np.arange(batch, dtype=np.int32) * 3
    adjusted = np.full((batch, width), np.nan, np.float32)
    candidates = np.full((batch, TILES, 2), np.nan, np.float32)
    pointers = [
        a.ctypes.data_as(ctypes.c_void_p) for a in (given, settings, position, adjusted, candidates)
    ]
    for task in range(TILES):
        device.run(rows, batch, task, width, *pointers)
    np.testing.assert_array_equal(adjusted, given)
    half = rows * STAGES // TILES
    for m in range(batch):
        scores = _scores(given[m], temperatures[m], 0, keys[m], int(position[m]))
        for task in range(TILES):
            part = scores[task * half : (task + 1) * half]
            best = task * half + int(part.argmax())
            assert candidates[m, task, 1].view(np.uint32) == best
            np.testing.assert_allclose(candidates[m, task, 0], scores[best], rtol=1e-4)
