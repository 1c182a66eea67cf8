"""Optimizers as graphs.

`step` adds the nodes that update parameters in place, so that forward, gradients and update are one
iteration of one kernel.

The optimizer's state, such as momentum, stays on the device between iterations. It is initially
zero. The formulas are those of torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ark.errors import InvalidUsageError
from ark.frontend.tensor import Tensor, as_tensor
from ark.ir.dtype import fp32
from ark.lower.rewrite.fuse_regions import MAX_SMALL_ELEMENTS
from ark.ops.activations import rsqrt, sqrt
from ark.ops.elementwise import add, cast, copy, div, mul, sub
from ark.ops.gradients.products import wide
from ark.ops.logic import greater
from ark.ops.math import expm1, reciprocal
from ark.ops.reductions import reduce_sum
from ark.ops.selection import clip, where
from ark.ops.views import new_tensor, reshape, tensor

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "clip_grad_norm"]

Rate = float | Tensor


class Optimizer:
    """The base class of the optimizers.

    parameters: tensors, or a module's params_dict(), of which those with requires_grad are used;
    duplicates are used once.

    lr: the learning rate, a number, or a tensor of one fp32 that the host or the graph changes.

    offload: keep the moments in host-mapped memory, which the update reads and writes; the device
    then has no memory for them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Iterable[Tensor],
        lr: Rate,
        offload: bool = False,
    ) -> None:
        if isinstance(parameters, Mapping):
            parameters = [p for p in parameters.values() if p.requires_grad]
        self.parameters = list(dict.fromkeys(parameters))
        if not self.parameters:
            raise InvalidUsageError("the optimizer was given no parameters")
        if not isinstance(lr, Tensor) and not 0 <= lr < math.inf:
            raise InvalidUsageError(f"lr={lr} is not valid; it must be at least 0")
        self.lr, self.offload = lr, offload

    def _moments(self) -> list[Tensor]:
        """A tensor of zeros for each parameter, where this optimizer keeps its moments."""
        arena = "host" if self.offload else "state"
        return [
            new_tensor("optim", arena, p.shape(), fp32, (), (), (), "") for p in self.parameters
        ]

    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """Adds the update of every parameter.

        gradients: in the parameters' order, as ark.grad returns them; by default those that
        Module.backward has set.
        """
        present = gradients
        if present is None:
            present = [g for g in (getattr(p, "gradient", None) for p in self.parameters) if g]
        if len(present) != len(self.parameters):
            raise InvalidUsageError(
                f"{len(self.parameters)} parameters have {len(present)} gradients; pass one for "
                "each, or call Module.backward first"
            )
        self._begin()
        # Small parameters of one size are updated one after the other, so that their updates become
        # one op.
        sizes = [as_tensor(p).ir.elements for p in self.parameters]
        small = {place: n for place, n in enumerate(sizes) if n <= MAX_SMALL_ELEMENTS}
        for place in sorted(range(len(sizes)), key=lambda place: small.get(place, 0)):
            target = as_tensor(self.parameters[place])
            updated = self._updated(place, wide(target), wide(present[place]))
            if target.ir.dtype == fp32:
                copy(updated, target, "update")
            else:
                cast(updated, target.ir.dtype, target, "update")

    def _begin(self) -> None:
        """Adds the computations that all parameters share, before the first parameter's update.
        Subclasses override it.
        """

    def _updated(self, place: int, value: Tensor, gradient: Tensor) -> Tensor:
        """The new value, in fp32, of parameter number `place`, whose present value is `value`."""
        raise NotImplementedError


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum (Sutskever et al. 2013) and weight decay.

    Examples:
        >>> w = ark.parameter([4], ark.fp32)
        >>> optimizer = ark.optim.SGD([w], lr=0.1)
        >>> optimizer.step([ark.tensor([4])])
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Iterable[Tensor],
        lr: Rate = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        offload: bool = False,
    ) -> None:
        super().__init__(parameters, lr, offload)
        if nesterov and not momentum:
            raise InvalidUsageError("nesterov needs a momentum above 0")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self.velocity = self._moments() if momentum else []

    def _updated(self, place: int, value: Tensor, gradient: Tensor) -> Tensor:
        if self.weight_decay:
            gradient = add(gradient, mul(value, self.weight_decay))
        if self.momentum:
            held = as_tensor(self.velocity[place])
            velocity = add(mul(held, self.momentum), gradient, held)
            moved = add(gradient, mul(velocity, self.momentum)) if self.nesterov else velocity
            gradient = moved
        return sub(value, mul(gradient, self.lr))


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); weight_decay is added to the gradient.

    Examples:
        >>> w = ark.parameter([4], ark.fp32)
        >>> optimizer = ark.optim.Adam([w], lr=0.1)
        >>> optimizer.step([ark.tensor([4])])
    """

    decoupled = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Iterable[Tensor],
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        offload: bool = False,
    ) -> None:
        super().__init__(parameters, lr, offload)
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidUsageError(
                f"betas={betas} are not valid; both must be at least 0 and below 1"
            )
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.steps = tensor([1], fp32)
        self.means, self.squares = self._moments(), self._moments()
        self._corrections: tuple[Tensor, Tensor] | None = None
        self._rate: Rate = lr

    def _begin(self) -> None:
        """Computes the factors that correct the running means for their bias, which are 1 / (1 -
        beta^t) after t steps. The factor of the mean of squares is replaced by its root, with which
        the root of that mean is multiplied. The learning rate is multiplied by the other factor.
        In the first steps, 1 - beta^t is so small that only expm1 keeps its digits.
        """
        held = as_tensor(self.steps)
        steps = add(held, 1.0, held)
        first, second = (
            mul(expm1(mul(steps, math.log(beta))), -1.0) if beta else add(mul(steps, 0.0), 1.0)
            for beta in self.betas
        )
        self._corrections = reciprocal(first), rsqrt(second)
        self._rate = mul(self._corrections[0], self.lr)

    def _direction(self, place: int, gradient: Tensor) -> Tensor:
        """The direction of Adam's step for parameter number `place`: the running mean of gradients,
        divided by the root of the running mean of squared gradients. Only the latter is corrected
        for its bias.
        """
        assert self._corrections is not None
        mean, square = as_tensor(self.means[place]), as_tensor(self.squares[place])
        one, two = self.betas
        mean = add(mul(mean, one), mul(gradient, 1 - one), mean)
        square = add(mul(square, two), mul(mul(gradient, gradient), 1 - two), square)
        return div(mean, add(mul(sqrt(square), self._corrections[1]), self.eps))

    def _updated(self, place: int, value: Tensor, gradient: Tensor) -> Tensor:
        if self.weight_decay and not self.decoupled:
            gradient = add(gradient, mul(value, self.weight_decay))
        direction = self._direction(place, gradient)
        if self.weight_decay and self.decoupled:
            value = sub(value, mul(mul(value, self.weight_decay), self.lr))
        return sub(value, mul(direction, self._rate))


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Examples:
        >>> w = ark.parameter([4], ark.fp32)
        >>> optimizer = ark.optim.AdamW([w], lr=0.1)
        >>> optimizer.step([ark.tensor([4])])
    """

    decoupled = True

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Iterable[Tensor],
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        offload: bool = False,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, offload)


class LAMB(AdamW):
    """LAMB: Adam's step, scaled so that its 2-norm is that of the parameter times the learning
    rate.

    You et al. 2020, algorithm 2, phi(x) = x, with decoupled weight decay. The step is not scaled if
    its norm or that of the parameter is 0.

    Examples:
        >>> w = ark.parameter([4], ark.fp32)
        >>> optimizer = ark.optim.LAMB([w], lr=0.1)
        >>> optimizer.step([ark.tensor([4])])
    """

    def _updated(self, place: int, value: Tensor, gradient: Tensor) -> Tensor:
        assert self._corrections is not None
        direction = mul(self._direction(place, gradient), self._corrections[0])
        if self.weight_decay:
            direction = add(direction, mul(value, self.weight_decay))
        own, asked = sqrt(_squares(value)), sqrt(_squares(direction))
        known = greater(mul(own, asked), 0.0)
        trust = where(known, div(own, asked), add(mul(own, 0.0), 1.0))
        return sub(value, mul(direction, mul(trust, self.lr)))


def clip_grad_norm(gradients: Sequence[Tensor], max_norm: float) -> tuple[list[Tensor], Tensor]:
    """The gradients scaled so that their common 2-norm is at most `max_norm`, and that norm.

    Returns the scaled gradients, and the 2-norm before scaling as a tensor of shape (1,), as
    torch.nn.utils.clip_grad_norm_ does (Pascanu et al. 2013).

    Examples:
        >>> scaled, norm = ark.optim.clip_grad_norm([ark.tensor([4])], max_norm=1.0)
        >>> scaled[0].shape(), norm.shape()
        ([4], [1])
    """
    total: Any = None
    for gradient in gradients:
        square = _squares(wide(gradient))
        total = square if total is None else add(total, square)
    norm = sqrt(total)
    scale = clip(div(max_norm, add(norm, 1e-6)), maximum=1.0)
    return [mul(g, _like(scale, g)) for g in gradients], norm


def _squares(value: Tensor) -> Tensor:
    """The sum of the squares of all elements, of shape (1,)."""
    flat = reshape(value, [value.ir.elements])
    return reduce_sum(mul(flat, flat), 0)


def _like(value: Tensor, other: Tensor) -> Tensor:
    return value if value.ir.dtype == other.ir.dtype else cast(value, other.ir.dtype)
