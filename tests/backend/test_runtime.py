"""ARK's Runtime, tensors and conversions on a device, called as ARK's users and tests do."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape).astype(dtype)


def test_quickstart(backend: str) -> None:
    rows, columns = 64, 64
    input_tensor = ark.tensor([rows, columns], ark.fp16)
    other_tensor = ark.tensor([rows, columns], ark.fp16)
    output_tensor = ark.add(input_tensor, other_tensor)
    runtime = ark.Runtime()
    runtime.launch()
    assert runtime.launched() and runtime.running()
    a, b = random(rows, columns, dtype="float16"), random(rows, columns, dtype="float16", seed=1)
    input_tensor.from_numpy(a)
    other_tensor.from_numpy(b)
    runtime.run()
    np.testing.assert_array_equal(output_tensor.to_numpy(), a + b)
    assert runtime.stop() > 0
    assert not runtime.launched() and not runtime.running()
    np.testing.assert_array_equal(output_tensor.to_numpy(), a + b)

    ark.Model.reset()  # a later model reads the result of an earlier one
    new_tensor = ark.tensor([rows, columns], ark.fp16)
    final = ark.add(output_tensor, new_tensor)
    runtime.launch()
    new_tensor.from_numpy(b)
    runtime.run()
    np.testing.assert_array_equal(final.to_numpy(), a + b + b)
    runtime.stop()


def test_empty_model_launches(backend: str) -> None:
    lone = ark.tensor([3])
    with ark.Runtime() as runtime:
        runtime.launch()
        lone.from_numpy(np.array([1, 2, 3]))
        runtime.run()
        runtime.stop()
    assert lone.to_numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize("loop_mode", [True, False])
def test_iterations_accumulate(backend: str, loop_mode: bool) -> None:
    counter = ark.tensor([2, 600])
    total = ark.tensor([2, 600])
    stepped = ark.add(counter, 1.0, output=counter)
    ark.add(total, stepped, output=total)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=loop_mode)
        runtime.run(3)
        assert counter.to_numpy().tolist() == np.full((2, 600), 3.0).tolist()
        runtime.run(4, non_blocking=True)
        runtime.wait()
        assert (counter.to_numpy() == 7).all()
        counter.from_numpy(np.zeros((2, 600)))
        runtime.run(2)
        assert (counter.to_numpy() == 2).all()
        assert (total.to_numpy() == sum(range(8)) + 1 + 2).all()
        runtime.barrier()


def test_only_held_tensors_keep_memory(backend: str) -> None:
    x = ark.tensor([64, 64])
    for _ in range(6):
        x = ark.add(x, 1.0)
    held = ark.Planner().plan().inner
    assert held is not None
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        runtime.run()
        assert (x.to_numpy() == 6).all()
    kept = [b for b in held.buffers if b.arena == "external"]
    assert len(kept) == 1
    assert held.arenas["activation"] <= 2 * 64 * 64 * 4


def test_chain_of_evals(backend: str) -> None:
    torch, device = torch_device(backend)
    a = torch.full((64,), 2.0, device=device)
    b = torch.full((64,), 3.0, device=device)
    c = ark.add(a, b)
    assert torch.equal(c.eval(), a + b)
    from ark.runtime.api.launched import Executor

    first = Executor.get().plan()
    d = ark.mul(ark.sub(c, 1.0), 4.0)
    assert torch.equal(d.eval(), torch.full((64,), 16.0, device=device))
    assert torch.equal(c.to_torch(), a + b)
    assert Executor.get().plan() != first
    x = torch.ones(64, device=device)
    for _ in range(5):
        x = ark.add(x * 2, 1.0).eval()
    assert torch.equal(x, torch.full((64,), 63.0, device=device))
    Executor.reset()
    assert Executor.get().plan() == ""


def torch_device(backend: str) -> Any:
    """Returns torch and its device for the backend. Skips if torch was built without it."""
    torch = pytest.importorskip("torch")
    if backend != "cpu" and not torch.cuda.is_available():
        pytest.skip(f"this torch was built without devices of {backend!r}")
    return torch, torch.from_dlpack(_launched()).device


def _launched() -> ark.Tensor:
    """Returns a tensor with memory."""
    output = ark.tensor([1])
    with ark.Runtime() as runtime:
        runtime.launch()
    ark.Model.reset()
    return output


def test_placeholders(backend: str) -> None:
    torch, device = torch_device(backend)
    bound = torch.arange(10, dtype=torch.float32, device=device).reshape(10, 1)
    now = ark.placeholder([10, 1], ark.fp32, data=bound)
    later = ark.placeholder([10, 1], ark.fp32)
    assert now.is_external() and not ark.tensor([1]).is_external()
    out = ark.add(ark.mul(now, 2.0), later)
    with ark.Runtime() as runtime:
        with pytest.raises(ark.InvalidUsageError, match="placeholder"):
            runtime.launch()
        with pytest.raises(ark.InvalidUsageError, match="torch tensor"):
            runtime.launch(tensor_mappings={later: np.ones((10, 1), np.float32)})
        first, second = (torch.full((10, 1), v, device=device) for v in (5.0, 7.0))
        runtime.launch(loop_mode=False, tensor_mappings={later: first})
        runtime.run()
        assert torch.equal(out.to_torch(), bound * 2 + 5)
        bound += 1
        runtime.run(tensor_mappings={later: second})
        assert torch.equal(out.to_torch(), bound * 2 + 7)
        runtime.launch(loop_mode=True, tensor_mappings={later: first})
        with pytest.raises(ark.InvalidUsageError, match="loop"):
            runtime.run(tensor_mappings={later: second})


def test_dlpack_copies_and_devices(backend: str) -> None:
    """Arrays are exchanged by the array API's protocol. NumPy requests host memory on every
    device.
    """
    x = ark.tensor([4, 6])
    part = ark.copy(x[1:3, 2:5])
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        runtime.run()
        own, host = x.__dlpack_device__(), (1, 0)
        for tensor, want in ((x, values), (x[1:3, 2:5], values[1:3, 2:5]), (part, part.to_numpy())):
            copied = np.from_dlpack(tensor, device="cpu", copy=True)
            np.testing.assert_array_equal(copied, want)
            x.from_numpy(values + 1)
            np.testing.assert_array_equal(copied, want)
            x.from_numpy(values)
        if own == host:
            seen = np.from_dlpack(x, copy=False)
            x.from_numpy(values + 1)
            np.testing.assert_array_equal(seen, values + 1)
        else:
            with pytest.raises(BufferError, match="copy=False"):
                x.__dlpack__(dl_device=host, copy=False)
    for strange in ((7, 0), (own[0], own[1] + 1), "cpu", 3):
        with pytest.raises(BufferError):
            x.__dlpack__(dl_device=strange)
    with pytest.raises(TypeError):
        x.__dlpack__(unknown=1)


def test_dlpack_copy_does_not_share_memory(backend: str) -> None:
    torch, device = torch_device(backend)
    x = ark.tensor([8])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(np.ones(8, np.float32))
        mine = torch.from_dlpack(x, copy=True)
        shared = torch.from_dlpack(x)
        mine.fill_(5.0)
        assert torch.equal(shared, torch.ones(8, device=device)) and mine.device == device


def test_torch_memory_is_shared_both_ways(backend: str) -> None:
    torch, device = torch_device(backend)
    data = torch.zeros(8, 8, device=device)
    ark.add(data, 1.0, output=data)
    ark.mul(data, 3.0, output=data)
    out = ark.copy(ark.Tensor.from_dlpack(data)[2:4, 1:5])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)  # a persistent kernel would block torch's kernels
        assert torch.equal(out.to_torch(), torch.zeros(2, 4, device=device))
        runtime.run()
        view = out.to_torch()
        assert torch.equal(data, torch.full((8, 8), 3.0, device=device))
        assert torch.equal(view, torch.full((2, 4), 3.0, device=device))
        view[0, 0] = 40
        assert out.to_numpy()[0, 0] == 40
    strided = ark.tensor([4, 6])
    with ark.Runtime() as runtime:
        runtime.launch()
        strided.from_numpy(np.arange(24).reshape(4, 6))
        part = strided[1:3, 2:5]
        assert part.to_torch().cpu().tolist() == [[8, 9, 10], [14, 15, 16]]
        part.copy(torch.zeros(2, 3))
        assert strided.to_numpy()[1:3].tolist() == [[6, 7, 0, 0, 0, 11], [12, 13, 0, 0, 0, 17]]
        half = ark.tensor([4], ark.bf16)
        runtime.launch()
        half.copy(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.bfloat16))
        assert half.to_torch().dtype == torch.bfloat16
        assert half.from_torch(torch.tensor([4.0, 3.0, 2.0, 1.0]).flip(0)) is half  # a cast
        assert half.to_numpy().astype(np.float32).tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(ark.InvalidUsageError, match="expected a torch tensor, got ndarray"):
            half.from_torch(np.zeros(4))
        half.copy(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.bfloat16))
        assert half.to_numpy().astype(np.float32).tolist() == [1.0, 2.0, 3.0, 0.5]


def test_exported_memory_outlives_its_tensor(backend: str) -> None:
    torch, _ = torch_device(backend)
    constant = ark.constant(7, [64, 64])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        runtime.run()
    view = constant.to_torch()
    capsule = constant.to_dlpack()
    del constant, capsule
    ark.Model.reset()
    assert torch.equal(view.cpu(), torch.full((64, 64), 7.0))


def test_overlapping_foreign_memory_is_refused(backend: str) -> None:
    torch, device = torch_device(backend)
    data = torch.zeros(64, device=device)
    a = ark.placeholder([32], data=data[:32])
    b = ark.placeholder([32], data=data[16:48])
    ark.add(a, 1.0, output=b)
    with ark.Runtime() as runtime, pytest.raises(ark.InvalidUsageError, match="overlap"):
        runtime.launch()


def test_usage_errors(backend: str) -> None:
    x = ark.tensor([4, 4])
    y = ark.exp(x)
    for call in (x.to_numpy, x.to_torch, lambda: x.from_numpy(np.zeros((4, 4)))):
        with pytest.raises(ark.InvalidUsageError, match="launch"):
            call()
    runtime = ark.Runtime()
    with pytest.raises(ark.InvalidUsageError, match="launch"):
        runtime.run()
    with runtime:
        runtime.launch()
        for count in (0, -1, 1.5, True, "3", None, 2**31, 2**32 + 1):
            with pytest.raises(ark.InvalidUsageError, match="is not a valid number of iterations"):
                runtime.run(count)
        runtime.run(np.int64(2))
        with pytest.raises(ark.InvalidUsageError, match="elements"):
            x.from_numpy(np.zeros(3))
        with pytest.raises(ark.InvalidUsageError, match="shape"):
            y.to_numpy(np.zeros((2, 8), np.float32))


def test_one_persistent_kernel_at_a_time(backend: str) -> None:
    x = ark.tensor([4])
    y = ark.add(x, 1.0)
    with ark.Runtime() as first:
        first.launch()
        with pytest.raises(ark.InvalidUsageError, match="another Runtime"):
            ark.Runtime().launch()
        first.run()
    with ark.Runtime() as second:
        second.launch()
        second.run()
        assert y.to_numpy().tolist() == [1, 1, 1, 1]


def test_plans_run_from_text_and_files(backend: str, tmp_path: Path) -> None:
    x = ark.tensor([8, 300])
    y = ark.softmax(ark.mul(x, 2.0))
    text = str(ark.Planner().plan())
    path = tmp_path / "plan.json"
    path.write_text(text)
    reread = ark.Plan.from_file(path)
    assert str(reread) == text
    assert reread.num_processors >= 1 and reread.world_size == 1 and reread.rank == 0
    array = random(8, 300)
    with ark.Runtime() as runtime:
        runtime.launch(plan=reread, loop_mode=False)
        x.from_numpy(array)
        runtime.run()
        e = np.exp(2.0 * array.astype(np.float64))
        np.testing.assert_allclose(y.to_numpy(), e / e.sum(1, keepdims=True), rtol=1e-5)
    broken = json.loads(text)
    broken["phases"][0]["processors"][0][-1][2] = []
    for tasks in broken["phases"][0]["processors"]:
        for task in tasks:
            task[2] = []
    with pytest.raises(ark.PlanError, match="refused"):
        ark.Runtime().launch(plan=ark.Plan(broken))


def test_more_iterations_than_a_launch_counts(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A persistent kernel is restarted before it reaches the largest number of iterations that it
    can count.
    """
    monkeypatch.setattr("ark.runtime.runtime.ITERATION_END", 8)
    x = ark.tensor([4])
    y = ark.add(x, 1.0, output=x)
    with ark.Runtime() as runtime:
        runtime.launch()
        for count in (5, 5, 7, 1):
            runtime.run(count)
        assert y.to_numpy().tolist() == [18.0] * 4


def test_launches_leave_no_library_behind(backend: str) -> None:
    """Each `eval` is a launch, which must unmap its library afterwards: a process may have about
    65,000 memory maps.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux's /proc")
    torch, device = torch_device(backend)
    x = torch.ones(64, device=device)

    def held() -> int:
        return len(maps.read_text().splitlines())

    def step(x: Any) -> Any:
        ark.Model.reset()
        return ark.add(x * 1.0, 1.0).eval()

    for _ in range(3):
        x = step(x)
    before = held()
    for _ in range(12):
        x = step(x)
    assert held() <= before + 3
    assert torch.equal(x, torch.full((64,), 16.0, device=device))


def test_profiler(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = ark.tensor([64, 64], ark.fp16)
    y = ark.mul(x, 2.0)
    plan = ark.Planner().plan()
    for loop_mode in (True, False):
        assert ark.profiler.timeit(plan, iter=5, loop_mode=loop_mode) > 0
    ark.Profiler(plan).run(iter=5, loop_mode=False, profile_processor_groups=True)
    shown = capsys.readouterr().out
    assert "whole plan" in shown and "processor group 0" in shown
    assert y.shape() == [64, 64]


def test_fault_leaves_the_process_usable(backend: str) -> None:
    ids, table = ark.tensor([4], ark.int32), ark.tensor([10, 8])
    out = ark.embedding(ids, table)
    runtime = ark.Runtime()
    runtime.launch(loop_mode=True)
    ids.from_numpy(np.array([0, 0, 10, 0]))
    with pytest.raises(ark.GpuError, match="10"):
        runtime.run()
    assert not runtime.running()
    ids.from_numpy(np.array([0, 0, 9, 0]))
    with runtime:
        runtime.launch(loop_mode=True)
        runtime.run()
        assert out.to_numpy().shape == (4, 8)


def test_stop_token_ends_the_run(backend: str) -> None:
    """A run in which the device samples a stop token ends there. The next run starts from the
    beginning.
    """
    counter = ark.tensor([1, 1])
    ark.add(counter, 1.0, output=counter)
    state = ark.TokenState.make(12)
    ark.sample(ark.concat([ark.constant(3.5, [1, 1], ark.fp32), counter], 1), state)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        state.settings.from_numpy(np.array([0, 0, 0, 0, 12, 1, 0], np.int32))
        state.stops.from_numpy(np.array([1] + [-1] * 15, np.int32))
        runtime.run(9)
        assert (counter.to_numpy().item(), state.position.to_numpy().item()) == (4.0, 4)
        runtime.run(9)
        assert counter.to_numpy().item() == 5.0


def test_stopping_needs_no_second_thread(backend: str) -> None:
    """`ark.init`, or the end of a `with` block of the runtime, ends a persistent kernel at once."""
    x = ark.tensor([4])
    y = ark.add(x, 1.0)
    runtime = ark.Runtime()
    runtime.launch()
    runtime.run()
    done = threading.Event()
    begin = time.monotonic()
    threading.Thread(target=lambda: (ark.init(backend=backend), done.set()), daemon=True).start()
    assert done.wait(30), "ark.init hangs on a persistent kernel"
    assert time.monotonic() - begin < 30
    assert not runtime.running()
    assert y.to_numpy().tolist() == [1, 1, 1, 1]


def test_idle_kernel_leaves_the_device_and_comes_back(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A persistent kernel without work leaves the device, so that other work can run. It is started
    again for the next iterations.
    """
    monkeypatch.setattr("ark.runtime.executor.IDLE_S", 0.2)
    x = ark.tensor([4])
    y = ark.add(x, 1.0, output=x)
    with ark.Runtime() as runtime:
        runtime.launch()
        runtime.run(3)
        end = time.monotonic() + 20
        while runtime.running() and time.monotonic() < end:
            time.sleep(0.02)
        assert not runtime.running(), "the kernel never leaves"
        runtime.run(2)
        assert y.to_numpy().tolist() == [5, 5, 5, 5]
        for _ in range(20):  # times near the moment at which it leaves
            time.sleep(0.19)
            runtime.run()
        assert y.to_numpy().tolist() == [25, 25, 25, 25]
