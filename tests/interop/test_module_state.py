"""What modules and optimizers hold between calls: modes, parameters, settings of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)


class Learner(torch.nn.Module):
    """A body and its loss."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Any, y: Any) -> Any:
        return torch.nn.functional.mse_loss(self.body(x), y)


def normed() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    )


def steps_equal(
    learner: Learner,
    optimizer: Callable[[Learner], Any],
    between: Callable[[Learner, Any], Any] = lambda learner, optimizer: None,
) -> None:
    """Compares three steps with torch's. between: what happens to both after a step."""
    theirs = copy.deepcopy(learner)
    mine, other = optimizer(learner), optimizer(theirs)
    model = ark.training_model(learner, None, mine)
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    for _ in range(3):
        other.zero_grad()
        loss = theirs(x, y)
        loss.backward()
        other.step()
        torch.testing.assert_close(model(x, y)[0], loss.detach(), rtol=1e-4, atol=1e-5)
        for (name, left), right in zip(
            learner.state_dict().items(), theirs.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)
        between(learner, mine)
        between(theirs, other)
    model.close()


def sgd(learner: Learner) -> Any:
    return torch.optim.SGD(learner.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def test_a_norm_in_eval_mode_stays_so_in_training() -> None:
    learner = Learner(normed())
    learner.body[1].eval()
    learner.body[1].running_mean += 1
    steps_equal(learner, sgd)
    assert learner.training and not learner.body[1].training


@pytest.mark.parametrize("mode", [True, False])
def test_modes_of_parts_are_restored(mode: bool) -> None:
    body = normed().train(mode)
    body[1].train(not mode)
    ark.from_torch(body, (torch.randn(4, 5),))
    assert [part.training for part in body] == [mode, not mode, mode, mode]
