"""ark.inference_model and ark.training_model compared with torch: k iterations are one launch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.errors import InvalidUsageError, UnsupportedError

torch = pytest.importorskip("torch")
from ark_cpu.device import CpuDevice, CpuLaunch  # noqa: E402

from ark.interop.torch import iterate  # noqa: E402
from ark.interop.torch.graph import pool_before_relu  # noqa: E402
from tests.slow import few  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets one entry for each launch."""
    results: list[int] = []
    launch: Callable[..., CpuLaunch] = CpuDevice.launch

    def counted(*args: Any, **named: Any) -> CpuLaunch:
        results.append(1)
        return launch(*args, **named)

    monkeypatch.setattr(CpuDevice, "launch", counted)
    return results


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.second(torch.nn.functional.silu(self.first(x)))


class Learner(Net):
    def forward(self, x: Any, y: Any) -> Any:
        result = super().forward(x)
        return result, torch.nn.functional.cross_entropy(result, y)


@pytest.mark.parametrize("twice", [False, True], ids=["read once", "read twice"])
def test_max_pool_behind_relu_trains_as_in_torch(twice: bool, monkeypatch: Any) -> None:
    """A relu that only the pool reads is applied to the pool's result, where it and its gradient
    have a ninth of the elements.
    """

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(2, 4, 3)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.first(x))
            pooled = torch.nn.functional.max_pool2d(y, 3)
            return (pooled * pooled).sum() + (y.mean() if twice else 0.0)

    moved: list[list[int]] = []

    def seen(module: Any) -> None:
        pool_before_relu(module)
        relus = (n for n in module.graph.nodes if "relu" in str(n.target))
        moved.extend(list(n.meta["val"].shape) for n in relus)

    monkeypatch.setattr(iterate, "pool_before_relu", seen)
    module, x = Pooled(), torch.randn(2, 2, 11, 11)
    wanted = copy.deepcopy(module)
    wanted(x).backward()
    before = [p.detach().clone() for p in module.parameters()]
    step = ark.training_model(module, None, torch.optim.SGD(module.parameters(), 1.0))
    close(step(x).reshape([]), wanted(x).detach())
    for old, new, other in zip(before, module.parameters(), wanted.parameters(), strict=True):
        close(old - new.detach(), other.grad)
    assert moved == ([[2, 4, 9, 9]] if twice else [[2, 4, 3, 3]])


MODES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "all": ({"output_mode": "all"}, lambda each: torch.cat(each)),
    "final": ({"output_mode": "final"}, lambda each: each[-1]),
    "sum": ({"output_mode": "sum"}, lambda each: torch.stack(each).sum(0)),
    "every": ({"output_mode": "every", "every": 3}, lambda each: torch.cat(each[2::3])),
}


@pytest.mark.parametrize("mode", MODES)
def test_device_iterations_are_one_launch(mode: str, launches: list[int]) -> None:
    words, expected = MODES[mode]
    net = Net()
    model = ark.inference_model(net, ark.torch.Options(device_iterations=6, **words))
    with torch.no_grad():
        for call in range(3):
            x = torch.randn(12, 6)
            got = model(x)
            close(got, expected([net(rows) for rows in x.split(2)]))
            assert len(launches) == call + 1
    runner = model._program._executor
    assert runner.latest.iterations_done == 18  # counted across launches
    assert runner.counters.values()[0] == 18 * runner.plan.counters[0].step
    model.close()


def test_each_replica_gets_its_own_rows(launches: list[int]) -> None:
    """Each replica gets its own rows of a batch: so a softmax over the batch depends only on the
    rows of the same replica.
    """

    class Share(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.softmax(x, 0), x.sum()

    model = ark.inference_model(Share(), ark.torch.Options(device_iterations=2, replication=3))
    x = torch.randn(24, 5)
    got, sums = model(x)
    close(got, torch.cat([torch.softmax(rows, 0) for rows in x.split(4)]))
    close(sums, torch.stack([rows.sum() for rows in x.split(4)]))
    assert len(launches) == 1


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.02),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 0.02}, {"params": p[2:], "lr": 0.01, "weight_decay": 0.1}]
    ),
}


@pytest.mark.parametrize("name", few(1, reversed(OPTIMIZERS)))
def test_training_steps_are_those_of_torch(name: str, launches: list[int]) -> None:
    """Training steps equal torch's: two calls of 3 steps with different learning rates, each with 2
    accumulated batches on 2 replicas.
    """
    ours = Learner()
    theirs = copy.deepcopy(ours)
    mine, other = (OPTIMIZERS[name](list(m.parameters())) for m in (ours, theirs))
    options = ark.torch.Options(
        device_iterations=3, replication=2, gradient_accumulation=2, output_mode="all"
    )
    model = ark.training_model(ours, options, mine)
    for call in range(2):
        x, y = torch.randn(60, 6), torch.randint(0, 4, (60,))
        _, losses = model(x, y)
        want = []
        for rows, labels in zip(x.split(20), y.split(20), strict=True):
            other.zero_grad()
            for part in zip(rows.split(5), labels.split(5), strict=True):
                loss = theirs(*part)[1]
                (loss / 4).backward()
                want.append(loss.detach())
            other.step()
        close(losses, torch.stack(want))
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-5)
        assert len(launches) == call + 1
        for group in (*mine.param_groups, *other.param_groups):
            group["lr"] *= 0.5


def test_last_loss_equals_plain_training() -> None:
    net = Learner()
    before = net.first.weight.detach().clone()
    result = torch.optim.SGD(net.parameters(), 0.1)
    model = ark.training_model(net, ark.torch.Options(device_iterations=4), result)
    out, loss = model(torch.randn(12, 6), torch.randint(0, 4, (12,)))
    assert out.shape == (3, 4) and loss.shape == (1,)
    assert (net.first.weight != before).any()  # in place


def test_pipeline_stages_have_processors_of_their_own() -> None:
    """Two pipeline stages run on two processors, with the same results as one."""
    net = Net()
    plain = net(x := torch.randn(8, 6)).detach()
    ark.torch.block(net.first, 0)
    ark.torch.block(net.second, 1)
    model = ark.inference_model(net, ark.torch.Options(replication=4))
    if ark.runtime.session.device().machine.processors < 2:
        with pytest.raises(InvalidUsageError, match="2 stages"):
            model(x)
        return
    close(model(x), plain)
    where, plan = processors_by_stage(model)
    half = plan.processors // 2
    assert max(where["first"]) < half <= min(where["second"])


def processors_by_stage(model: Any) -> tuple[dict[str, set[int]], Any]:
    """Returns, for each pipeline stage, the processors whose tasks use tensors of the shape of its
    layer's weight; and the plan.
    """
    plan = model._program._plan
    where: dict[str, set[int]] = {}
    for processor, tasks in enumerate(plan.phases[0].processors):
        for task in tasks:
            op = plan.ops[task.op]
            shapes = {plan.tensors[i].shape for i in op.operands}
            for stage, weight in (("first", (16, 6)), ("second", (4, 16))):
                if weight in shapes:
                    where.setdefault(stage, set()).add(processor)
    return where, plan


@pytest.mark.parametrize("name", few(1, OPTIMIZERS))
def test_gradients_and_updates_stay_on_their_stages(name: str, launches: list[int]) -> None:
    """Steps of two stages equal torch's. Every task on a weight, its gradient or its moments runs
    on the stage's processors.
    """
    if ark.runtime.session.device().machine.processors < 2:
        pytest.skip("two stages need two processors")
    ours = Learner()
    theirs = copy.deepcopy(ours)
    mine, other = (OPTIMIZERS[name](list(m.parameters())) for m in (ours, theirs))
    ark.torch.block(ours.first, 0)
    ark.torch.block(ours.second, 1)
    options = ark.torch.Options(device_iterations=3, gradient_accumulation=2)
    model = ark.training_model(ours, options, mine)
    x, y = torch.randn(30, 6), torch.randint(0, 4, (30,))
    model(x, y)
    for rows, labels in zip(x.split(10), y.split(10), strict=True):
        other.zero_grad()
        for part in zip(rows.split(5), labels.split(5), strict=True):
            (theirs(*part)[1] / 2).backward()
        other.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-5)
    assert len(launches) == 1
    where, plan = processors_by_stage(model)
    half = plan.processors // 2
    assert max(where["first"]) < half <= min(where["second"])


def test_running_statistics_of_a_batch_norm_are_kept() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)

        def forward(self, x: Any) -> Any:
            return self.out(self.norm(x)).square().mean()

    ours = Normed()
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs))
    x = torch.randn(24, 6) * 3 + 1
    ark.training_model(ours, ark.torch.Options(device_iterations=3), mine)(x)
    for rows in x.split(8):
        other.zero_grad()
        theirs(rows).backward()
        other.step()
    for (name, left), right in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device_iterations": 0}, "device_iterations=0"),
        ({"output_mode": "some"}, "must be one of all, final, sum, every"),
        ({"output_mode": "every", "every": 4, "device_iterations": 6}, "must divide"),
        ({"every": 2, "device_iterations": 4}, "every requires"),
    ],
)
def test_bad_options(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsageError, match=message):
        ark.torch.Options(**words)


def test_unsupported_training_steps_are_refused() -> None:
    net = Net()
    model = ark.inference_model(net, ark.torch.Options(device_iterations=5))
    with pytest.raises(InvalidUsageError, match=r"\[12\] rows; .* a multiple of 5"):
        model(torch.randn(12, 6))
    model(torch.randn(10, 6))
    with pytest.raises(InvalidUsageError, match="create another one for these sizes"):
        model(torch.randn(20, 6))
    with pytest.raises(UnsupportedError, match="RMSprop is not supported"):
        ark.training_model(net, None, torch.optim.RMSprop(net.parameters()))
    with pytest.raises(InvalidUsageError, match="must be the loss"):
        ark.training_model(net, None, torch.optim.SGD(net.parameters(), 0.1))(torch.randn(2, 6))
    with pytest.raises(InvalidUsageError, match="requires training_model"):
        ark.inference_model(net, ark.torch.Options(gradient_accumulation=2))
    with pytest.raises(InvalidUsageError, match="stage=-1"):
        ark.torch.block(net, -1)
