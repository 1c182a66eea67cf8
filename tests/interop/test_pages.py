"""docs/torch.md and docs/onnx.md: their examples give torch's and onnx's own results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.cli import main
from tests.pages import DOCS, python_blocks
from tests.slow import slow

torch = pytest.importorskip("torch")


def test_torch_module_as_a_kernel() -> None:
    ark.init(backend="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    x = torch.randn(4, 8)
    space: dict[str, Any] = {"model": model, "x": x}
    torch._dynamo.reset()
    with torch.no_grad():
        exec(python_blocks("torch.md")[0], space)
        torch.testing.assert_close(space["y"], model(x))
        more = torch.randn(7, 8)
        torch.testing.assert_close(space["kernel"](more), model(more))


@slow
def test_many_iterations_per_call() -> None:
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 1)

        def forward(self, x: Any, *y: Any) -> Any:
            return (self.line(x) - y[0]).square().mean() if y else self.line(x)

    ark.init(backend="cpu")
    inference, training = python_blocks("torch.md")[1].split("\n\n")
    module = Loss()
    x = torch.randn(8 * 4, 8)
    space: dict[str, Any] = {"ark": ark, "torch": torch, "module": module, "x": x}
    exec(inference, space)
    torch.testing.assert_close(space["y"], module(x))
    before = module.line.weight.detach().clone()
    space |= {"x": torch.randn(100 * 8 * 2, 8), "y": torch.randn(100 * 8 * 2, 1)}
    exec(training, space)
    assert (module.line.weight - before).abs().max() > 0.01


def test_onnx_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = ["batch", 4]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["input", "mask"], ["kept"]),
            helper.make_node("MatMul", ["kept", "weight"], ["logits"]),
        ],
        "page",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, rows) for n in ("input", "mask")],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(weight, "weight")],
    )
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    monkeypatch.chdir(tmp_path)
    onnx.save(result, "model.onnx")
    x, mask = np.ones((1, 4), np.float32), np.arange(4, dtype=np.float32)[None]
    np.save("t.npy", x)
    np.save("m.npy", mask)
    (want,) = ReferenceEvaluator(result).run(None, {"input": x, "mask": mask})
    *_, command = re.findall(r"^\$ (ark run .*)$", (DOCS / "onnx.md").read_text(), re.M)
    words = [word.replace("tokens=", "input=") for word in shlex.split(command)[1:]]
    assert main([*words, "--backend", "cpu"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), want)
    (example,) = python_blocks("onnx.md")
    ark.init(backend="cpu")
    space: dict[str, Any] = {"x": x, "mask": mask}
    exec(example.replace("model(x)", "model(x, mask)"), space)
    np.testing.assert_array_equal(space["y"], want)
    model = ark.from_onnx("model.onnx", dims={"batch": 1})
    np.testing.assert_array_equal(model.run({"input": x, "mask": mask})[0], want)
    launched, _ = model._launched(model.checked({"input": x, "mask": mask}))
    there, inline = launched.runtime.executor, launched.inline
    assert there is not None and there.plan.processors == 1
    assert inline is not None and inline.short()  # later runs use this thread
    for times in (2.0, 3.0):
        (got,) = model.run({"input": x * np.float32(times), "mask": mask})
        np.testing.assert_array_equal(got, want * np.float32(times))
    model.close()
