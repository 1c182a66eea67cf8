"""Training in two processes, each with an emulated gfx942, gives torch's losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "train" / "ranks.py"


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["data", "1f1b"])
def test_emulated_devices_learn_as_torch_does(plan: str) -> None:
    for module in ("torch", "transformers", "ark_rocm_emulator", "hip"):
        pytest.importorskip(module)
    argv = [sys.executable, str(EXAMPLE), "--backend", "rocm", "--plan", plan, "--ranks", "2"]
    done = subprocess.run(
        [*argv, "--steps", "2", "--small", "--vs", "torch"],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "ARK_ROCM_DEVICE": "emulated:gfx942,2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ranks"] == 2 and len(report["losses"]) == 2
    assert report["largest difference"] < 1e-4
    assert report["losses"][1] < report["losses"][0] - 0.05
