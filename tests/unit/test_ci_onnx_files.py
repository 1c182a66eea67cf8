"""ci/onnx_files.py: its table rows for ONNX files in packages, compared with onnxruntime."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.cases.ci import load
from tests.slow import slow

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
onnx_files = load("onnx_files")


def save(path: Path, operator: str) -> None:
    """A file of one operator with an open first dimension."""
    given, result = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in "xy"
    )
    node = onnx.helper.make_node(operator, ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "one", [given], [result])
    sets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=sets, ir_version=8), path)


def test_symbolic_dimensions_get_sizes(tmp_path: Path) -> None:
    save(tmp_path / "relu.onnx", "Relu")
    (array,) = onnx_files.inputs(tmp_path / "relu.onnx").values()
    assert array.shape == (1, 3) and array.dtype == np.float32


def test_different_shapes_and_values_have_a_distance() -> None:
    one = np.ones((2, 2), np.float32)
    assert onnx_files.distance(one, one) == 0.0
    assert onnx_files.distance(one, 3 * one) == 0.5
    assert onnx_files.distance(one, one[0]) == float("inf")


@slow
def test_every_file_of_a_package_is_a_row(tmp_path: Path) -> None:
    save(tmp_path / "relu.onnx", "Relu")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "relu.onnx", "some_package/relu.onnx")
        wheel.writestr("some_package/broken.onnx", b"none")
        wheel.writestr("some_package/__init__.py", "")
    page = tmp_path / "page.md"
    assert onnx_files.main([str(page), "--wheels", str(wheels)]) == 0
    broken, relu = [line for line in page.read_text().splitlines() if "some_package" in line]
    assert "onnxruntime: " in broken
    assert relu == "| some_package-1.0 | `relu.onnx` | 0.0e+00 |"
