"""Runs ark's backend tests on emulated AMD devices, two runs side by side: `nox` calls it.

The first argument is a JSON list of runs as in ci/matrix.toml under [[emulated]]. A run is one
pytest process; its output is printed whole when all is done. Words behind it are a command that
runs meanwhile. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

# What the slow session runs alone: of what generates with a model, models whose tasks are of the
# same kinds as those of one that stays; ops whose bodies those have that stay; and, by file,
# compositions of ops that others cover, other decoders, every op in every type, what bodies use of
# scratch memory, what ends processes and streams from outside (on the device an early end of a
# stream is the same), those that bring an emulated device of their own, which need no second one,
# and those that run on the same device with all checks (`synchronising`). What is of another device
# is not even imported.
RARE = (
    "sharded-untied",
    "tied-mha",
    "odd-sizes",
    "rocm-fp16",
    "16_bits",
    "rocm-fp32]",
    "shipped_checkpoint",
    "draws_as_it_does_alone",
    "own_chunk_and_context",
    "without_a_prompt_phase",
    "large_chunk_draws",
    "follows_the_softmax",
    "no_draw_is_infinite",
    "only_from_the_best",
    "no_numbers",
    "ends_the_benchmark",
    "of_the_page",
    "long_lines",
    "test_windows",
    "test_images",
    "any_shape",
    "three_nodes",
    "where_scales_are_powers_of_two",
    "rows_that_are",
    "largest_of_rows",
    "of_rows[rocm-maximum",
)
SELDOM = (
    *("channels_last", "decoders", "examples", "gradients", "hints", "mesh", "pose"),
    *("rocm_attention", "rocm_linear", "rocm_matmul", "scratch", "stopping", "training", "types"),
)
# Of one op in several types or sizes, those of which others stay; the slow session runs them all.
SIBLINGS = (
    *("few_lines[rocm-set", "few_lines[rocm-maximum", "few_bits[rocm-ark.int4"),
    *("few_bits[rocm-ark.uint4", "expert_linear_are_torchs[rocm-ark.fp16", "warp[rocm-262139"),
    *("exact[rocm-1", "exact[rocm-2", "written[rocm-dtype1", "functions[rocm-shape1"),
    *("twice[rocm-dtype1", "asked[rocm-iterations0", "says[rocm-positions1"),
    *(
        "rows[rocm-narrow",
        "test_products[rocm",
        "few_bits[rocm-ark.int8",
        "expert_linear_are_torchs[rocm-ark.bf16",
    ),
)
# Of ops and random programs each runs on one architecture, by turns: matrix products on both.
ON_GFX942 = (
    *("test_reductions", "test_views", "test_unary", "test_integers", "test_padding"),
    *("chains_become_one", "scalars_and_constants", "programs[rocm-1", "programs[rocm-3"),
)
ON_GFX1100 = (
    *("each_type]", "test_movement", "test_in_place", "test_casts", "test_binary"),
    *("end_within_a_warp", "programs[rocm-2", "programs[rocm-5"),
)
CHECKED = ("faults", "programs")
ELSEWHERE = [f"tests/backend/test_{name}.py" for name in (*SELDOM, *CHECKED)]
# The words of ci/matrix.toml for tests on emulated devices, the longest first.
TESTS: dict[str, tuple[str, ...]] = {
    "all": ("tests/backend",),
    "usual": (
        "tests/backend",
        *(f"--ignore={file}" for file in ELSEWHERE),
        *("-k", f"rocm and not ({' or '.join((*RARE, *SIBLINGS, *ON_GFX1100))})"),
    ),
    "some": ("tests/backend/test_ops.py", "tests/backend/test_faults.py"),
    "checked": (
        *(f"tests/backend/test_{name}.py" for name in ("ops", *CHECKED)),
        *("-k", f"rocm and not ({' or '.join((*SIBLINGS, 'missing_packet', *ON_GFX942))})"),
    ),
    "synchronising": (
        *(f"tests/backend/test_{name}.py" for name in CHECKED),
        *("-k", f"rocm and not ({' or '.join(ON_GFX1100)})"),
    ),
}
SIDE_BY_SIDE = 2


def command(run: dict[str, Any]) -> list[str]:
    """What runs the tests of one entry."""
    # Each keeps its own notes of the last run.
    cache = f"cache_dir=.pytest_cache/{run['arch']}-{run['seed']}-{run['tests']}"
    words = TESTS[run["tests"]]  # a second -k counts, the first does not
    return [sys.executable, "-m", "pytest", "-q", "-o", cache, "-k", "rocm", *words]


def environment(run: dict[str, Any]) -> dict[str, str]:
    """The device that its tests see."""
    return {
        **os.environ,
        "ARK_ROCM_DEVICE": f"emulated:{run['arch']}",
        "ARK_ROCM_EMULATOR_SEED": str(run["seed"]),
        "ARK_ROCM_EMULATOR_CHECKS": str(int(run["checks"])),
        "ARK_ROCM_EMULATOR_IMPLICIT_SYNC": "0",  # what is freed under a kernel fails the test
        "ARK_REQUIRE": "rocm:1",
    }


def one(run: dict[str, Any]) -> tuple[dict[str, Any], int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        command(run),
        env=environment(run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run, done.returncode, done.stdout, time.monotonic() - began


def main(runs: list[dict[str, Any]], other: list[str]) -> int:
    ordered = sorted(runs, key=lambda run: list(TESTS).index(run["tests"]))
    failed: list[object] = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        started = [pool.submit(one, run) for run in ordered]
        if other and subprocess.run(other, check=False).returncode:
            failed.append(other)
        for future in as_completed(started):
            run, code, said, seconds = future.result()
            print(f"\n--- {json.dumps(run)}: {seconds:.0f} s, exit code {code}\n{said}", flush=True)
            failed += [run] if code else []
    for run in failed:
        print(f"failed: {json.dumps(run)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
