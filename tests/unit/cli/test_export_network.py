"""`ark export model.onnx`: the program's outputs are those of `ark run`, and torch's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from ark.cli import main
from tests.cases.export import ADDRESSES, Library, compile_c

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
from tests.interop import graphs  # noqa: E402


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_program_of_a_network_runs_it(name: str, tmp_path: Path) -> None:
    module, example = graphs.networks()[name]
    graphs.export(module, example, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", example.numpy())
    (tmp_path / "x.bin").write_bytes(example.numpy().tobytes())
    out = tmp_path / "out"
    words = [str(tmp_path / "net.onnx"), "--backend", "cpu"]
    assert main(["export", *words, "--name", "net", "-o", str(out)]) == 0
    program = compile_c(out, "net", "net_run", *ADDRESSES, "run.c")
    files = [out / "net.safetensors", tmp_path / "x.bin", tmp_path / "y.bin"]
    done = subprocess.run(
        [program, *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    got = np.frombuffer((tmp_path / "y.bin").read_bytes(), np.float32)
    where = ["--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy")]
    assert main(["run", *words, *where]) == 0
    want = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        wanted = module(example).numpy().reshape(-1)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    short = subprocess.run([program, *files[:2]], capture_output=True, text=True, check=False)
    assert short.returncode == 2 and "usage" in short.stderr
    (tmp_path / "x.bin").write_bytes(b"123")
    bad = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "could not be read" in bad.stderr


def test_tensors_are_called_as_in_the_file(tmp_path: Path) -> None:
    """Tensors have the names of the ONNX file in the exported program, even if ark uses such a name
    itself or an output is an input.
    """
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    ports = [helper.make_tensor_value_info(n, float32, [4]) for n in ("matmul", "add/0:1", "sum")]
    nodes = [
        helper.make_node("Mul", ["matmul", "add/0:1"], ["product"]),
        helper.make_node("Add", ["product", "matmul"], ["sum"]),
    ]
    graph = helper.make_graph(nodes, "net", ports[:2], [ports[2], ports[0]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "net.onnx")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "net.onnx"), "--backend", "cpu", "-o", str(out)]) == 0
    library = Library(compile_c(out, "net", "net.so", "-fPIC", "-shared"), "net")
    a, b = np.arange(4, dtype=np.float32), np.full(4, 3, np.float32)
    assert library.array("ark_write", "matmul", a) == library.array("ark_write", "add/0:1", b) == 0
    assert library.execute([1]) == 0
    got, same = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert library.array("ark_read", "sum", got) == 0
    assert library.array("ark_read", "matmul.out", same) == 0
    np.testing.assert_array_equal(got, a * b + a)
    np.testing.assert_array_equal(same, a)
    library("ark_destroy")


def test_types_that_ark_lacks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Types that ark lacks are refused. Otherwise the C program would expect another number of
    bytes than the file states.
    """
    helper, short = onnx.helper, onnx.TensorProto.INT16
    ports = [helper.make_tensor_value_info(n, short, [4]) for n in ("x", "y")]
    node = helper.make_node("Add", ["x", "x"], ["y"])
    graph = helper.make_graph([node], "net", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "net.onnx")
    words = ["export", str(tmp_path / "net.onnx"), "--backend", "cpu", "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert "'x' is of int16, which ark has no type for" in capsys.readouterr().err
