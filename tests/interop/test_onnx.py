"""ONNX files compared with onnx's node tests, its reference evaluator and torch, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import ark
from ark.cli import main
from tests.interop import graphs
from tests.interop.node_suite import run_case, selected

SAMPLE = (
    "test_add_bcast",
    "test_clip_example",
    "test_gather_negative_indices",
    "test_gemm_transposeA",
    "test_layer_normalization_4d_axis1",
    "test_reduce_mean_keepdims_example",
    "test_reshape_negative_dim",
    "test_slice_neg_steps",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@pytest.mark.parametrize("case", selected(SAMPLE), ids=lambda case: case.name)
def test_sample_of_the_node_suite(case) -> None:
    run_case(case)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "attention"])
def test_models_exported_by_torch_equal_torch(name: str, tmp_path: Path) -> None:
    module, example = graphs.networks()[name]
    graphs.export(module, example, tmp_path / "model.onnx")
    model = ark.from_onnx(tmp_path / "model.onnx")
    (got,) = model(example.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(got, module(example).numpy(), rtol=2e-4, atol=2e-5)
    other = torch.randn_like(example)
    with torch.no_grad():
        want = module(other).numpy()
    np.testing.assert_allclose(model(other.numpy())[0], want, rtol=2e-4, atol=2e-5)
    model.close()


def test_from_onnx_of_a_model_in_memory_says_to_save_it() -> None:
    with pytest.raises(ark.InvalidUsageError, match="type ModelProto for its path; save the model"):
        ark.from_onnx(network())  # type: ignore[arg-type]


def network(*nodes: onnx.NodeProto, shape=("batch", 4), external: str = "") -> onnx.ModelProto:
    """Returns a model with input x, output y and a weight w (4, 4)."""
    weights = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * 2, "w")
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_command_runs_a_model_with_weights_beside_it(tmp_path: Path, capsys) -> None:
    onnx.save_model(
        network(),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "x.npy", x)
    words = ["run", str(tmp_path / "m.onnx"), "--input", f"x={tmp_path / 'x.npy'}"]
    words += ["--output", str(tmp_path / "y.npy"), "--backend", "cpu"]
    assert main([*words, "--dim", "batch=3"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), x * 2)
    assert main([*words, "--dim", "batch=2"]) == 2
    assert "the array is float32 [3, 4]" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--dim", "rows=2"]) == 2
    assert "symbolic dimensions ['batch']" in " ".join(capsys.readouterr().err.split())


def refused(tmp_path: Path, capsys, content: bytes) -> str:
    """Runs an `ark` command on a file with this content, which it must refuse. Returns its
    message.
    """
    (tmp_path / "bad.onnx").write_bytes(content)
    assert main(["run", str(tmp_path / "bad.onnx"), "--backend", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("ark: ") and "Traceback" not in errors
    return " ".join(errors.split())


def test_all_missing_operators_are_listed_at_once(tmp_path: Path, capsys) -> None:
    model = network(
        helper.make_node("Det", ["x"], ["d"], name="determinant"),
        helper.make_node("RandomNormalLike", ["x"], ["n"], name="noise"),
        helper.make_node("RandomNormalLike", ["x"], ["y"]),
        shape=(4, 4),
    )
    message = refused(tmp_path, capsys, model.SerializeToString())
    assert "Det: determinant; RandomNormalLike: noise, number 2" in message


def test_missing_operator_in_a_loop_is_listed_with_the_loop(tmp_path: Path, capsys) -> None:
    value = helper.make_tensor_value_info
    goes_on = [value("i", TensorProto.INT64, ()), value("c", TensorProto.BOOL, ())]
    state = value("s", TensorProto.FLOAT, (4, 4))
    ends = [value("d", TensorProto.BOOL, ()), value("o", TensorProto.FLOAT, (4, 4))]
    steps = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Det", ["s"], ["o"])]
    body = helper.make_graph(steps, "b", [*goes_on, state], ends)
    count = onnx.numpy_helper.from_array(np.array(3))
    trips = helper.make_node("Constant", [], ["n"], value=count)
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], name="rounds", body=body)
    message = refused(tmp_path, capsys, network(trips, loop, shape=(4, 4)).SerializeToString())
    assert "Loop (node rounds): Det (node number 1): the operator is not supported" in message


def test_bad_files(tmp_path: Path, capsys) -> None:
    whole = network().SerializeToString()
    assert "is not an ONNX model" in refused(tmp_path, capsys, whole[: len(whole) // 2])
    circle = network(
        helper.make_node("Relu", ["b"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Add", ["x", "b"], ["y"]),
    )
    assert "not a valid ONNX model" in refused(tmp_path, capsys, circle.SerializeToString())
    types = network(helper.make_node("And", ["x", "x"], ["y"]))
    assert "not a valid ONNX model" in refused(tmp_path, capsys, types.SerializeToString())
    outside = network()
    weight = outside.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret")
    assert "outside of the model's folder" in refused(tmp_path, capsys, outside.SerializeToString())


MUTATIONS = """
import pathlib, random, sys
import ark
whole = pathlib.Path(sys.argv[1]).read_bytes()
target = pathlib.Path(sys.argv[2])
for seed in range(100):
    rng, data = random.Random(seed), bytearray(whole)
    for _ in range(rng.choice((1, 3, 9))):
        at = rng.randrange(len(data))
        how = rng.randrange(3)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
    target.write_bytes(data)
    try:
        ark.from_onnx(target)
        print("accepted")
    except ark.BaseError as error:
        print("refused:", " ".join(str(error).split())[:200].encode())
"""


def test_mutated_files_end_in_one_paragraph(tmp_path: Path) -> None:
    """Each of 100 mutated files is either run or refused with an error message of one paragraph.
    They are run in a separate process, so that a crash would be noticed.
    """
    whole = tmp_path / "whole.onnx"
    whole.write_bytes(network(shape=(2, 4)).SerializeToString())
    words = [sys.executable, "-c", MUTATIONS, str(whole), str(tmp_path / "mutated.onnx")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 100 and {line.split()[0] for line in lines} >= {"refused:"}
