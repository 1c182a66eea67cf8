"""Replicas of ark.training_model on several ranks: k steps in one launch of each rank, compared
with torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from ark_cpu.device import CpuDevice, CpuLaunch  # noqa: E402

from tests.slow import slow  # noqa: E402

WORLD, STEPS, ROWS = 2, 3, 4
REPLICAS, BATCHES = 4, 2  # 2 replicas a rank, of 2 accumulated batches


class Learner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

    def forward(self, x: Any, y: Any) -> Any:
        result = self.second(torch.nn.functional.silu(self.first(x)))
        return torch.nn.functional.cross_entropy(result, y)


def counted() -> list[int]:
    """Returns a list that gets one entry for each later launch in this process."""
    results: list[int] = []
    launch: Callable[..., CpuLaunch] = CpuDevice.launch

    def count(*args: Any, **named: Any) -> CpuLaunch:
        results.append(1)
        return launch(*args, **named)

    CpuDevice.launch = count  # type: ignore[method-assign]
    return results


def train() -> None:
    """The body of each rank: it trains on the rows of its replicas, and torch trains on all rows
    for comparison.
    """
    ark.init(backend="cpu")
    torch.manual_seed(0)
    rank, launches = ark.Model.get_rank(), counted()
    ours = Learner()
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.AdamW(m.parameters(), 0.02) for m in (ours, theirs))
    options = ark.torch.Options(
        device_iterations=STEPS,
        replication=REPLICAS,
        gradient_accumulation=BATCHES,
        output_mode="all",
    )
    model = ark.training_model(ours, options, mine)
    each = REPLICAS // WORLD * BATCHES  # batches of a rank in a step
    for call in range(2):
        x = torch.randn(STEPS, WORLD, each, ROWS, 6)
        y = torch.randint(0, 3, (STEPS, WORLD, each, ROWS))
        losses = model(x[:, rank].reshape(-1, 6), y[:, rank].reshape(-1))
        want = []
        for step in range(STEPS):
            other.zero_grad()
            for owner in range(WORLD):
                for rows, labels in zip(x[step, owner], y[step, owner], strict=True):
                    loss = theirs(rows, labels)
                    (loss / (WORLD * each)).backward()
                    if owner == rank:
                        want.append(loss.detach())
            other.step()
        torch.testing.assert_close(losses, torch.stack(want), rtol=2e-5, atol=2e-5)
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-5)
        assert len(launches) == call + 1
    model.close()


def refuse() -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)
    three = ark.torch.Options(replication=3)
    with pytest.raises(ark.InvalidUsageError, match="3 is not divisible by the 2 ranks of the job"):
        ark.inference_model(torch.nn.Linear(2, 2), three)(torch.ones(6, 2))
    two = ark.torch.Options(replication=2)
    result = ark.inference_model(torch.nn.Linear(2, 2), two)  # one replica on each rank
    assert result(torch.ones(1, 2)).shape == (1, 2)
    torch.manual_seed(ark.Model.get_rank())
    net = Learner()
    model = ark.training_model(net, two, torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ark.SystemError, match="disagree on the parameters of the module"):
        model(torch.ones(2, 6), torch.zeros(2, dtype=torch.int64))


def train_and_refuse() -> None:
    """The body of each rank: both `train` and `refuse`, in one launch, because importing torch
    takes longer than either.
    """
    train()
    refuse()


@slow
def test_replicas_on_ranks_train_as_torch_and_invalid_ones_are_refused() -> None:
    assert ark.launch(WORLD, train_and_refuse) == 0
