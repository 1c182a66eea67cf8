"""The parts of ARK's interface that need no device: shapes, views, models, modules, errors,
plans.
"""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry


def test_every_exported_name_exists() -> None:
    for name in (*ark.__all__, *ark.ops.__all__):
        assert getattr(ark, name) is not None or name == "NullTensor"
    assert ark.version() == ark.__version__
    assert ark.error.InvalidUsageError is ark.InvalidUsageError
    assert ark.core.DIMS_LEN == 8 and ark.core.FP32 is ark.fp32
    assert (ark.fp8_e4m3, ark.fp8_e5m2) == (ark.FP8_E4M3, ark.FP8_E5M2)
    ark.core.srand(3)
    assert [ark.core.rand() for _ in range(2)] != [ark.core.rand() for _ in range(2)]


def test_star_import_keeps_python_s_own_names() -> None:
    names: dict[str, Any] = {}
    exec("from ark import *", names)
    assert names["matmul"] is ark.matmul and names["fp32"] is ark.fp32
    assert [name for name in vars(builtins) if name in names and name != "__builtins__"] == []
    assert ark.abs is ark.ops.abs and ark.bool is not bool


@pytest.mark.parametrize("name", ["get", "put", "sampling", "signal", "wait"])
def test_unsupported_interfaces_are_refused(name: str) -> None:
    assert not hasattr(ark, name) and getattr(ark, name, None) is None
    with pytest.raises(ark.UnsupportedError, match=name):
        getattr(ark, name)
    with pytest.raises(AttributeError):
        _ = ark.nothing_of_that_name


def test_import_needs_no_torch() -> None:
    code = "import sys; import ark; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


SHAPES = {
    "add": (lambda a, b: ark.add(a, b), [64, 32]),
    "number": (lambda a, b: ark.add(1.0, a), [64, 32]),
    "matmul": (lambda a, b: ark.matmul(a, b, transpose_other=True), [64, 64]),
    "transpose": (lambda a, b: ark.transpose(a, [1, 0]), [32, 64]),
    "max 0": (lambda a, b: ark.reduce_max(a, axis=0, keepdims=True), [1, 32]),
    "max 0 dropped": (lambda a, b: ark.reduce_max(a, axis=0, keepdims=False), [32]),
    "sum 1 dropped": (lambda a, b: ark.reduce_sum(a, axis=1, keepdims=False), [64]),
    "mean": (lambda a, b: ark.mean(a, axis=-1), [64, 1]),
    "softmax": (lambda a, b: ark.softmax(a), [64, 32]),
    "reshape": (lambda a, b: ark.reshape(a, [64, -1, 4]), [64, 8, 4]),
    "identity": (lambda a, b: ark.identity(a, deps=[b]), [64, 32]),
    "rope": (lambda a, b: ark.rope(a, b), [64, 32]),
    "row": (lambda a, b: a[2], [1, 32]),
    "box": (lambda a, b: a[2:6, :16], [4, 16]),
    "negative": (lambda a, b: a[-3:, -1], [3, 1]),
    "cast": (lambda a, b: ark.cast(a, ark.fp32), [64, 32]),
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_result_shapes(name: str) -> None:
    build, shape = SHAPES[name]
    a, b = ark.tensor([64, 32], ark.fp16), ark.tensor([64, 32], ark.fp16)
    assert build(a, b).shape() == shape


def test_other_shapes() -> None:
    table = ark.tensor([100, 4096], ark.fp16)
    assert ark.embedding(ark.tensor([6, 7], ark.int32), table).shape() == [6, 7, 4096]
    assert ark.copy(42.0).shape() == [1]
    assert ark.add(2.5, 3.5) == 6.0
    out = ark.tensor([1])
    assert ark.add(2.0, 3.0, output=out).shape() == [1]
    shards = ark.sharding(ark.tensor([64, 64]), axis=0, dim_per_shard=2)
    assert len(shards) == 32 and shards[3].shape() == [2, 64]
    assert ark.noop(out) is None
    padded = ark.tensor([3, 5], padded_shape=[4, 8])
    assert padded.strides() == [4, 8] and padded.shape() == [3, 5] and padded.nelems() == 15
    assert ark.tensor(ark.Dims(4, 5)).shape() == [4, 5] and ark.Dims([2, 3]).nelems() == 6


def bad(kind: type[Exception], call: Any, match: str | None = None) -> Any:
    return pytest.param(kind, call, match)


BAD = [
    bad(ark.InvalidUsageError, lambda a: ark.tensor([0])),
    bad(ark.InvalidUsageError, lambda a: ark.tensor([1] * 9), "8 dimensions"),
    bad(ValueError, lambda a: ark.tensor([1] * 9)),
    bad(ark.InvalidUsageError, lambda a: ark.tensor(64)),
    bad(ark.InvalidUsageError, lambda a: ark.tensor([64], strides=64)),
    bad(ark.InvalidUsageError, lambda a: ark.tensor([64], offsets="bad")),
    bad(ark.InvalidUsageError, lambda a: ark.tensor([64], padded_shape=128)),
    bad(ark.InvalidUsageError, lambda a: ark.tensor([64], "fp32")),
    bad(ark.ModelError, lambda a: ark.tensor([64], offsets=[1]), "fit its buffer"),
    bad(ark.UnsupportedError, lambda a: ark.tensor([64], rank=3)),
    bad(ark.InvalidUsageError, lambda a: ark.reshape(a, 64)),
    bad(ark.InvalidUsageError, lambda a: ark.reshape(a, [1] * 8 + [2048])),
    bad(ark.ModelError, lambda a: ark.reshape(a, [3, -1])),
    bad(ark.ModelError, lambda a: ark.reshape(a, [0, 32], allowzero=True)),
    bad(ark.ModelError, lambda a: ark.reshape(a, [-1, -1])),
    bad(ark.InvalidUsageError, lambda a: ark.transpose(a, 0)),
    bad(ark.InvalidUsageError, lambda a: ark.transpose(a, [0, 1, 2, 3, 4])),
    bad(ark.InvalidUsageError, lambda a: ark.transpose(a, [0, 0])),
    bad(ark.InvalidUsageError, lambda a: ark.identity(a, deps=["no tensor"])),
    bad(ark.InvalidUsageError, lambda a: ark.add(a, "no tensor")),
    bad(ark.ModelError, lambda a: ark.add(a, ark.tensor([64, 31], ark.fp16)), "broadcast"),
    bad(ark.ModelError, lambda a: ark.add(a, ark.tensor([64, 32])), "types"),
    bad(ark.ModelError, lambda a: ark.matmul(a, a), "inner sizes"),
    bad(ark.ModelError, lambda a: ark.exp(ark.tensor([4], ark.int32))),
    bad(ark.ModelError, lambda a: ark.add(ark.tensor([4], ark.int32), 0.5), "is not an integer"),
    bad(ark.UnsupportedError, lambda a: ark.add(ark.tensor([4], ark.bool), 1), "bool"),
    bad(ark.ModelError, lambda a: ark.exp(a, output=ark.tensor([64, 31], ark.fp16))),
    bad(ark.ModelError, lambda a: ark.exp(a, output=ark.tensor([64, 32]))),
    bad(ark.InvalidUsageError, lambda a: ark.reduce_sum(a, 2)),
    bad(ark.InvalidUsageError, lambda a: ark.cast(a, "fp32")),
    bad(ark.ModelError, lambda a: ark.sharding(a, 0, 5)),
    bad(ark.ModelError, lambda a: ark.rope(a, ark.tensor([64, 1], ark.fp16))),
    bad(ark.ModelError, lambda a: ark.embedding(a, a)),
    bad(ark.ModelError, lambda a: ark.rmsnorm(a, ark.tensor([31], ark.fp16))),
    bad(ark.ModelError, lambda a: ark.kv_append(a, a, ark.tensor([1], ark.int32))),
    bad(ark.UnsupportedError, lambda a: a[::2], "step"),
    bad(ark.InvalidUsageError, lambda a: a[0, 0, 0]),
    bad(ark.InvalidUsageError, lambda a: a["bad"]),
    bad(ark.InvalidUsageError, lambda a: a[64]),
    bad(ark.InvalidUsageError, lambda a: a[3:3]),
    bad(ark.InvalidUsageError, lambda a: ark.set_world_size(0)),
    bad(ark.InvalidUsageError, lambda a: ark.Model.set_device_id(-1)),
    bad(ark.InvalidUsageError, lambda a: ark.parameter([2]).update_gradient(a)),
    bad(ark.InvalidUsageError, lambda a: ark.Module().backward(), "not called"),
    bad(ark.InvalidUsageError, lambda a: ark.grad(a, a), "grad_outputs"),
    bad(ark.InvalidUsageError, lambda a: ark.optim.SGD([], 0.1)),
    bad(ark.ModelError, lambda a: ark.cross_entropy(a, a)),
    bad(ark.InvalidUsageError, lambda a: ark.PlannerContext(nothing=1)),
    bad(ark.InvalidUsageError, lambda a: ark.DataType.from_name("fp7")),
    bad(ark.SystemError, lambda a: ark.init(arch="no such thing") or ark.exp(a).eval()),
]


@pytest.mark.parametrize(("kind", "call", "match"), BAD)
def test_invalid_calls_raise_readable_errors(
    kind: type[Exception], call: Any, match: str | None
) -> None:
    tensor = ark.tensor([64, 32], ark.fp16)
    with pytest.raises(kind, match=match) as caught:
        call(tensor)
    assert isinstance(caught.value, ark.BaseError)
    assert len(str(caught.value)) > 20


def test_types_and_torch() -> None:
    torch = pytest.importorskip("torch")
    for name in ("float32", "float16", "bfloat16", "int32", "int8", "uint8"):
        kind = getattr(torch, name)
        assert ark.DataType.from_torch(kind).to_torch() is kind
    with pytest.raises(ValueError, match="float64"):
        ark.DataType.from_torch(torch.float64)
    assert ark.DataType.from_numpy(np.float16) is ark.fp16
    assert ark.DataType.from_ctype(ark.bf16.ctype()) is ark.bf16
    assert ark.fp32.element_size() == 4


def test_equality_and_hash() -> None:
    a, b = ark.tensor([64]), ark.tensor([64])
    assert a == a and a != b and a != 42 and a != "text"
    assert len({a, b, a}) == 2


def test_model_json() -> None:
    a, b = ark.tensor([64, 64], ark.fp16), ark.tensor([64, 64], ark.fp16)
    ark.relu(ark.add(a, b))
    model = ark.Model.get_model().compress()
    data = json.loads(model.serialize())
    assert [n["Op"]["Type"] for n in data["Nodes"]] == ["Add", "Relu"]
    assert data["Nodes"][1]["ProducerNodeIds"] == [0]
    assert data["Nodes"][0]["ConsumerNodeIds"] == [1]
    assert data["Nodes"][0]["Op"]["ReadTensors"][0]["DataType"] == "FP16"
    assert json.loads(str(model)) == data
    assert len(model.serialize(pretty=False)) < len(model.serialize())
    ark.Model.reset()
    assert json.loads(ark.Model.get_model().serialize())["Nodes"] == []


def test_ranks_and_models() -> None:
    ark.set_world_size(4)
    ark.set_rank(3)
    assert (ark.Model.get_rank(), ark.Model.get_world_size()) == (3, 4)
    assert ark.all_reduce(ark.tensor([8]), 3, 4).shape() == [8]
    assert ark.send_done(ark.send(ark.tensor([8]), 1, 0)).shape() == [8]
    assert ark.recv(ark.tensor([8]), 1, 0).shape() == [8]
    before = ark.current_model()
    with ark.use_model(ark.Model()) as inner:
        assert ark.current_model() is inner is not before
    assert ark.current_model() is before
    ark.init()
    assert (ark.Model.get_rank(), ark.Model.get_world_size()) == (0, 1)


class Block(ark.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = ark.parameter([3, 4], ark.fp16)

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        return ark.matmul(x, self.weight, transpose_other=True)


class Net(ark.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.bias = ark.Parameter(ark.tensor([3], ark.fp16))

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        return ark.add(self.block(x), self.bias)


def test_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    assert sorted(net.params_dict()) == ["bias", "block.weight"]
    assert sorted(net.params_dict("net.")) == ["net.bias", "net.block.weight"]
    assert net.sub_modules["block"] is net.block and net.parameters["bias"] is net.bias
    for register in (net.register_module, net.register_parameter):
        with pytest.raises(TypeError):
            register("bad", "neither")
    x = ark.tensor([2, 4], ark.fp16)
    out = net(x)
    state = {
        "block.weight": np.arange(12).reshape(3, 4).astype(np.float16),
        "bias": np.ones(3, np.float16),
    }
    path = tmp_path / "state.pkl"
    ark.save(state, path)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        net.load_state_dict({**ark.load(path), "more": np.zeros(1)})
        assert "more" in capsys.readouterr().err
        x.from_numpy(np.eye(4)[:2])
        runtime.run()
        want = state["block.weight"][:, :2].T + 1
        np.testing.assert_array_equal(out.to_numpy(), want)
        for name, array in net.state_dict().items():
            np.testing.assert_array_equal(array, state[name])
        with pytest.raises(ark.InvalidUsageError, match=r"block\.weight"):
            net.load_state_dict({"bias": state["bias"]})
        with pytest.raises(ark.InvalidUsageError, match="shape"):
            net.load_state_dict({**state, "bias": np.ones(4)})


def test_load_runs_no_code(tmp_path: Path) -> None:
    import os
    import pickle

    class Trap:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    path = tmp_path / "trap.pkl"
    path.write_bytes(pickle.dumps({"w": Trap()}))
    with pytest.raises(ark.InvalidUsageError, match="not a saved state"):
        ark.load(path)
    path.write_bytes(b"\x80\x04damaged")
    with pytest.raises(ark.InvalidUsageError):
        ark.load(path)
    ark.save([1, 2], path)
    assert ark.load(path) == [1, 2]


def test_load_builds_nothing_but_arrays(tmp_path: Path) -> None:
    """A file with an object dtype or a wrong size is refused. Before, NumPy used a number from the
    file as an address.
    """
    import struct

    path = tmp_path / "state.safetensors"
    header = {"w": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}}
    for entry in (header, {"w": {**header["w"], "dtype": "F64", "data_offsets": [0, 1 << 60]}}):
        text = json.dumps(entry).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x41" * 8)
        with pytest.raises(ark.InvalidUsageError, match="not a saved state"):
            ark.load(path)
    with pytest.raises(ark.InvalidUsageError, match="not a regular file"):
        ark.load("/dev/zero")
    with pytest.raises(ark.InvalidUsageError, match="save takes arrays"):
        ark.save({"w": object()}, path)
    with pytest.raises(ark.InvalidUsageError, match="number type"):
        ark.save({"w": np.array([object()])}, path)


def test_saved_state_comes_back_as_it_was(tmp_path: Path) -> None:
    import ml_dtypes
    import torch
    from safetensors.numpy import load_file

    path = tmp_path / "state.safetensors"
    state = {
        "z": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "scalar": np.float64(2.5),
        "bf16": np.arange(3).astype(ml_dtypes.bfloat16),
        "torch": torch.arange(3, dtype=torch.bfloat16),
        "none": np.zeros((0, 2), np.int64),
        "steps": 3,
    }
    ark.save(state, path)
    loaded = ark.load(path)
    assert list(loaded) == list(state) and loaded["steps"] == 3
    np.testing.assert_array_equal(loaded["z"], state["z"])
    assert loaded["scalar"].shape == () and loaded["none"].shape == (0, 2)
    for name in ("bf16", "torch"):
        assert loaded[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(loaded[name].astype(np.float32), [0, 1, 2])
    loaded["z"][0, 0] = 7  # the array is writable and independent of the file
    np.testing.assert_array_equal(load_file(path)["z"], state["z"])


def test_eval_runs_the_tensors_own_model() -> None:
    """Tensor.eval runs the model that the tensor belongs to, although the current model was
    reset.
    """
    x = ark.tensor([4], ark.fp32)
    y = ark.add(x, 1.0)
    first = y.eval()
    x.from_numpy(np.arange(4, dtype=np.float32))
    ark.Model.reset()
    ark.add(ark.tensor([4], ark.fp32), 5.0)
    np.testing.assert_array_equal(np.asarray(y.eval()), [1, 2, 3, 4])
    with ark.use_model(ark.Model()):
        x.from_numpy(np.full(4, 2.0, np.float32))
        np.testing.assert_array_equal(np.asarray(y.eval()), [3, 3, 3, 3])
    ark.init()
    x.from_numpy(np.zeros(4, np.float32))
    np.testing.assert_array_equal(np.asarray(y.eval()), np.ones(4))
    del first


def test_named_backend_without_devices_says_why() -> None:
    for name in ("cuda", "rocm"):
        if name in registry.names() and not registry.get(name).probe().devices:
            with pytest.raises(ark.SystemError, match=name):
                ark.init(backend=name)
    with pytest.raises(ark.InvalidUsageError):
        ark.init(backend="nothing")


def test_model_names_are_one_class() -> None:
    for wrong in ("x", 3, object()):
        with pytest.raises(ark.InvalidUsageError, match="expected a model"):
            ark.set_model(wrong)
        with pytest.raises(ark.InvalidUsageError, match="expected a model"), ark.use_model(wrong):
            pass
    outer = ark.current_model()
    with ark.use_model(None) as inner:
        assert isinstance(inner, ark.Model) and inner is not outer
        assert ark.current_model() is inner
    assert ark.current_model() is outer


def test_threads_build_models_of_their_own() -> None:
    """A `with use_model(...)` block sets the current model of its own thread only. Other threads
    keep the model of the process.
    """
    ark.init()
    outer = ark.current_model()
    everyone, records = threading.Barrier(4), []

    def work() -> None:
        seen = ark.current_model()
        with ark.use_model(ark.Model()) as mine:
            everyone.wait(60)
            ark.relu(ark.tensor([4]))
            everyone.wait(60)
            records.append((seen is outer, ark.current_model() is mine, len(mine.graph.nodes)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records == [(True, True, 1)] * 4 and not outer.graph.nodes


def test_names_as_arks_scripts_use_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import ark.torch
    from ark.data_type import DataType, fp32
    from ark.error import InvalidUsageError, ModelError

    assert (InvalidUsageError, ModelError) == (ark.InvalidUsageError, ark.ModelError)
    assert ark.torch._no_torch is False and ark.torch.torch.float32 is not None
    for name in ("fp32", "bf16", "int8", "byte"):
        kind = DataType.from_name(type_name=name)
        assert DataType.from_ctype(ctype=kind.ctype()) is kind
    assert DataType.from_numpy(np_type=np.float32) is fp32
    assert fp32.ctype() is ark.core.FP32
    with pytest.raises(ark.InvalidUsageError, match=r"not a type of ark\.core"):
        DataType.from_ctype("float")
    ark.log.WARN("three", "words", 1)
    assert capsys.readouterr().err == "ark warn: three words 1\n"
    assert ark.log.DEBUG < ark.log.INFO < ark.log.WARN
    ark.save({"w": np.ones(2)}, state_dict_file_path=tmp_path / "w")
    assert ark.load(state_dict_file_path=tmp_path / "w")["w"].tolist() == [1, 1]
    assert ark.Plan.from_str(plan_str=str(ark.Plan(None))).rank == 0
    (tmp_path / "plan.json").write_text(str(ark.Plan(None)))
    assert ark.Plan.from_file(file_path=tmp_path / "plan.json").rank == 0


def test_copy_broadcasts_into_a_larger_output() -> None:
    x, out = ark.tensor([1, 4], ark.fp32), ark.tensor([3, 4], ark.fp32)
    y = ark.copy(x, out)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(np.arange(4, dtype=np.float32))
        runtime.run()
        np.testing.assert_array_equal(y.to_numpy(), np.tile(np.arange(4), (3, 1)))
    with pytest.raises(ark.ModelError):
        ark.copy(ark.tensor([3, 4], ark.fp32), ark.tensor([1, 4], ark.fp32))
