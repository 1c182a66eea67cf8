"""Times ops that were slower in ark than in torch on an H200: in this checkout of ark, in an older
checkout and in torch. The ops with the largest expected gain from the latest change come first.

`python bench/slow_ops.py [--before CHECKOUT] [--backend cuda] [NAMES...]` needs a device. With two
checkouts it takes less than three minutes. Prints microseconds per call: before, now, torch, torch
/ now.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
NAMES = (
    "lstm-10x100-h256-bf16",
    "sweep-cumsum-1-8x1048576-fp32",
    "sweep-index-pairs-4096x4096-fp32",
    "sweep-sum-1-64x257x1000-fp32",
    "sweep-sum-1-64x257x1000-bf16",
    "sweep-sum-2-64x257x1000-fp32",
    "sweep-sum-2-64x257x1000-bf16",
    "sweep-sum-02-64x257x1000-fp32",
    "sweep-sum-0-64x257x1000-fp32",
    "sweep-argmax-1-64x257x1000-fp32",
    "sweep-cumsum-0-4194304-fp32",
    "sweep-batch-norm-16x64x56x56-fp32",
    "sweep-batch-norm-16x64x56x56-bf16",
    "sweep-group-norm-16x64x57x57-fp32",
    "sweep-matrix-vector-4096x4096-fp32",
    "sweep-linear-10-512x512-fp32",
    "sweep-log-softmax-2048x32000-fp32",
    "sweep-cat-1-odd-8192x33-fp32",
    "sweep-cross-entropy-128x10-bf16",
    "matmul-16x4096x4096-nt-fp32",
    "matmul-512x512x512-nn-bf16",
    "matmul-4096x4096x4096-tn-fp32",
)
CHILD = """
import contextlib, json, sys
from ark.backend import registry
from ark.cli.measure.cases import cases
from ark.cli.measure.ops import measure
backend = registry.get(sys.argv[1])
listed = {c.name: c for c in cases()}
with contextlib.closing(backend.open(0)) as device:
    for name in sys.argv[3:]:
        peer = sys.argv[2] == "1"
        f = measure(listed[name], backend, device, device.machine, repeats=3, peer=peer)
        print(json.dumps([name, f.seconds, f.peer_seconds, f.distance, f.error]), flush=True)
"""


def figures(checkout: Path, backend: str, peer: bool, names: list[str]) -> dict[str, Any]:
    """Measures ops with the version of ark in `checkout`, in a separate process. Returns for each
    case, by name: ark's seconds, torch's seconds, the distance between their results, and an error
    message if the case failed.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    roots = [checkout, *sorted(p for p in (checkout / "backends").iterdir() if p.is_dir())]
    path = os.pathsep.join([*map(str, roots), *filter(None, given)])
    words = [sys.executable, "-c", CHILD, backend, str(int(peer)), *names]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        words, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return {row[0]: row[1:] for row in map(json.loads, done.stdout.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--backend", default="cuda")
    options = parser.parse_args()
    names = list(options.names)
    now = figures(HERE, options.backend, True, names)
    before = (
        figures(options.before.resolve(), options.backend, False, names) if options.before else {}
    )
    print(f"{'op':40} {'before':>9} {'now':>9} {'torch':>9} {'ratio':>6}  off")
    for name in names:
        seconds, theirs, off, error = now.get(name, (0.0, None, None, "the run ended before it"))
        old = before.get(name, (0.0,))[0]
        if error or not seconds:
            print(f"{name:40} {error}")
            continue
        shown = f"{old * 1e6:9.2f}" if old else " " * 9
        print(
            f"{name:40} {shown} {seconds * 1e6:9.2f} {theirs * 1e6:9.2f} {theirs / seconds:6.2f}"
            f"  {off:.1e}"
        )


if __name__ == "__main__":
    main()
