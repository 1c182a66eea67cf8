"""Lists ONNX files that packages on the package index contain, by name, with inputs for each.
Called by ark.cli.measure.onnx_models and ark.cli.bench_models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class File:
    """One file. package: the name under which the package is installed. path: the file's path in
    the imported package's folder. shapes: the shapes of inputs that are random numbers. values:
    other inputs.
    """

    package: str
    path: str
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Any]

    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of the model in this file, by name. Random numbers come from a fixed seed."""
        random = np.random.default_rng(3)
        shapes = self.shapes.items()
        drawn = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes}
        return drawn | {n: np.asarray(v) for n, v in self.values.items()}


FILES = {
    "silero-vad-1x512": File(
        "silero-vad",
        "silero_vad/data/silero_vad.onnx",
        {"input": (1, 576), "state": (2, 1, 128)},
        {"sr": np.int64(16000)},
    ),
    "swift-f0-1x16000": File(
        "swift-f0",
        "swift_f0/model.onnx",
        {"audio": (1, 16000)},
        {"fmin": np.float32(46.875), "fmax": np.float32(2093.75)},
    ),
    "nudenet-1x320": File("nudenet", "nudenet/320n.onnx", {"images": (1, 3, 320, 320)}, {}),
}
