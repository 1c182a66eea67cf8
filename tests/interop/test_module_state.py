"""What modules and optimizers hold between calls: modes, parameters, settings of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.errors import InvalidUsageError, UnsupportedError

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
    """Compares three training steps by ark with torch's. between: a function that changes the
    learner and the optimizer after each step, called for ark and for torch.
    """
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


def test_norm_in_eval_mode_stays_so_in_training() -> None:
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


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).relu())[:, :3]


def test_tied_weights_are_trained_as_one() -> None:
    steps_equal(Learner(Tied()), sgd)


def moved(learner: Learner, optimizer: Any) -> None:
    for parameter in learner.parameters():
        parameter.data = parameter.data * 1.5


def test_parameters_that_move_between_steps_are_found() -> None:
    steps_equal(Learner(torch.nn.Linear(5, 3)), sgd, moved)


def new_buffer(body: Any) -> None:
    body[1].running_mean = torch.ones(4)


def assigned(body: Any) -> None:
    body.load_state_dict({k: v + 1 for k, v in body.state_dict().items()}, assign=True)


def other_data(body: Any) -> None:
    body[0].weight.data = body[0].weight.data * 2


@pytest.mark.parametrize("change", [new_buffer, assigned, other_data])
@pytest.mark.parametrize(
    "kernel",
    [
        lambda body: ark.from_torch(body, (torch.randn(4, 5),)),
        lambda body: ark.from_torch(
            body,
            (torch.randn(4, 5),),
            dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=9)},),
        ),
        lambda body: ark.inference_model(body),
    ],
)
def test_replaced_tensors_are_found(kernel: Callable[[Any], Any], change: Any) -> None:
    """A kernel uses the new tensors if tensors that a module holds are replaced after the kernel
    was compiled.
    """
    body = normed().eval().requires_grad_(False)
    run = kernel(body)
    x = torch.randn(4, 5)
    torch.testing.assert_close(run(x), body(x))
    change(body)
    torch.testing.assert_close(run(x), body(x))


def test_tensors_that_no_longer_fit_are_named() -> None:
    body = torch.nn.Linear(5, 3)
    run = ark.from_torch(body, (torch.randn(4, 5),))
    body.half()
    with pytest.raises(
        InvalidUsageError, match=r"'weight' is torch.float16 \[3, 5\]; .*torch.float32"
    ):
        run(torch.randn(4, 5))
    body.float().bias = None
    with pytest.raises(InvalidUsageError, match="'bias' is removed"):
        run(torch.randn(4, 5))


def test_replaced_parameters_of_an_optimizer_are_refused() -> None:
    learner = Learner(Tied())
    model = ark.training_model(learner, None, sgd(learner))
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    model(x, y)
    weight = learner.body.a.weight
    learner.body.b.weight = torch.nn.Parameter(weight.detach().clone())
    with pytest.raises(InvalidUsageError, match="were one tensor"):
        model(x, y)
    learner.body.b.weight = weight
    learner.body.a.bias = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(InvalidUsageError, match=r"'body\.a\.bias' was replaced"):
        model(x, y)


@pytest.mark.parametrize(
    "kernel", [lambda m: ark.from_torch(m, (torch.ones(2, 4),)), lambda m: ark.inference_model(m)]
)
def test_parameter_that_is_turned_in_place_is_refused(kernel: Callable[[Any], Any]) -> None:
    """A parameter that is transposed in place keeps its address and its shape, but not its strides.
    The next call is refused.
    """
    body = torch.nn.Linear(4, 4).requires_grad_(False).eval()
    run = kernel(body)
    run(torch.ones(2, 4))
    body.weight.data = body.weight.data.t()
    with pytest.raises((InvalidUsageError, UnsupportedError), match="contiguous"):
        run(torch.ones(2, 4))


class Unused(torch.nn.Module):
    """A module of two layers that reads only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        return self.a(x)


def test_parameters_without_a_gradient_stay() -> None:
    """Parameters without a gradient are not updated, as in torch. If their gradient were taken as
    zero, weight decay would change them.
    """
    steps_equal(Learner(Unused()), sgd)


def after_steps_of_torch(learner: Any, optimizer: Any) -> None:
    learner(torch.randn(4, 5), torch.randn(4, 3)).backward()
    optimizer.step()


def other_momentum(learner: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.5


def frozen(learner: Any, optimizer: Any) -> None:
    learner.body.bias.requires_grad_(False)


def another_group(learner: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def hook_of_a_gradient(learner: Any, optimizer: Any) -> None:
    learner.body.weight.register_hook(lambda gradient: gradient * 0)


def hook_of_the_optimizer(learner: Any, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *given: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (after_steps_of_torch, "momentum_buffer"),
        (other_momentum, r"momentum was 0\.9 and is 0\.5; only lr may change"),
        (frozen, "groups or their parameters"),
        (another_group, "groups or their parameters"),
        (hook_of_a_gradient, "hooks"),
        (hook_of_the_optimizer, "hooks"),
    ],
)
def test_changes_of_an_optimizer_are_refused(
    change: Callable[[Any, Any], None], message: str
) -> None:
    learner = Learner(torch.nn.Linear(5, 3))
    optimizer = sgd(learner)
    model = ark.training_model(learner, None, optimizer)
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    model(x, y)
    change(learner, optimizer)
    with pytest.raises((InvalidUsageError, UnsupportedError), match=message):
        model(x, y)


def test_state_and_hooks_are_refused_before_the_first_step() -> None:
    learner = Learner(torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(learner.parameters())
    after_steps_of_torch(learner, optimizer)
    with pytest.raises(InvalidUsageError, match="exp_avg"):
        ark.training_model(learner, None, optimizer)
    learner.body.register_full_backward_hook(lambda *given: None)
    model = ark.training_model(learner, None, sgd(learner))
    with pytest.raises(UnsupportedError, match="backward hooks of modules"):
        model(torch.randn(4, 5), torch.randn(4, 3))


class Silent(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return None


class Tail(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, 1:]


def test_modules_that_cannot_be_kernels_are_refused_with_a_reason() -> None:
    with pytest.raises(InvalidUsageError, match="returns no tensor"):
        ark.from_torch(Silent(), (torch.randn(3, 4),))
    columns = torch.export.Dim("columns", min=1, max=64)
    with pytest.raises(InvalidUsageError, match=r"Constraints violated .* columns <= 64 satisfy"):
        ark.from_torch(Tail(), (torch.randn(3, 4),), dynamic_shapes=({1: columns},))
