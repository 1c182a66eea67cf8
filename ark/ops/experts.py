"""Ops for a mixture of experts.

topk chooses each row's experts; expert_linear multiplies each row by the weights of its experts
(Shazeer et al. 2017). The weights of an expert that was not chosen are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ExpertLinearAttributes, TopKAttributes
from ark.ir.dtype import RowType, fp32, int32
from ark.ir.values import whole
from ark.lower.ops.experts import lower_expert_linear, lower_topk
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.tasks import expression


def topk(
    input: TensorLike, k: int, name: str = "", *, largest: bool = True
) -> tuple[Tensor, Tensor]:
    """The k largest elements of each row in descending order, and their indices.

    input: (rows, n), fp32, fp16 or bf16. Returns the elements (rows, k), of the input's type, and
    the indices (rows, k), int32. largest: if False, the k smallest in ascending order. Of equal
    elements the one with the smallest index comes first. NaN is larger than all others, as in
    torch. Raises InvalidUsageError unless 1 <= k <= n.

    Examples:
        >>> values, indices = ark.topk(torch.tensor([[1.0, 9.0, 5.0]]), k=2)
        >>> values.eval(), indices.to_torch()
        (tensor([[9., 5.]]), tensor([[1, 2]], dtype=torch.int32))
    """
    tensor = as_tensor(input)
    dtype = float_dtype("topk", tensor)
    if len(tensor.ir.shape) != 2:
        raise ModelError(f"topk: the input has shape {list(tensor.ir.shape)}; expected (rows, n)")
    rows, n = tensor.ir.shape
    k = whole("topk", k)
    if not 1 <= k <= n:
        raise InvalidUsageError(f"topk: k={k} is out of range; it must be 1 to {n}")
    model = Model.get_model()
    label = model.graph.scoped(name or "topk") if model.graph.scopes else name
    values = model.new_tensor((rows, k), dtype, name=label)
    indices = model.new_tensor((rows, k), int32, name=label and f"{label}.indices")
    attrs = TopKAttributes(k=k, least=not largest).to_node()
    model.graph.add("topk", [tensor.ir], [values, indices], attrs, name)
    return Tensor(values, model), Tensor(indices, model)


@runtime_checkable
class ExpertWeight(Protocol):
    """A weight for `expert_linear` that consists of several tensors, such as a quantised one."""

    def expert_linear(
        self, input: TensorLike, experts: TensorLike, output: TensorLike | None, name: str
    ) -> Tensor:
        """Called by ark.expert_linear(input, weight, experts) if `weight` is this object; returns
        the result.
        """


def expert_linear(
    input: TensorLike,
    weight: TensorLike | ExpertWeight,
    experts: TensorLike,
    output: Output = None,
    name: str = "",
    first: int = 0,
    of: int | None = None,
) -> Tensor:
    """Multiplies each row by the weights of the experts that were chosen for it.

    input: (rows, k), a row per token, or (rows, slots, k) with another input for each chosen
    expert. weight: (experts, n, k). experts: (rows, slots) int32, the numbers of the experts that
    were chosen for each row. The result is (rows, slots, n), of the input's type: result[r, s] =
    weight[experts[r, s]] @ input[r].

    The weight has the input's type, or any floating-point type if the input is fp32. It may also be
    quantised (a RowType), or an object with a method `expert_linear`. An expert number that is out
    of range ends the run with a GpuError that names it.

    first, of: used if `weight` contains only some of `of` experts, as on a rank of expert
    parallelism. These are the experts with the numbers from `first` on. The results of the other
    experts are 0.

    Examples:
        >>> x, experts = torch.ones(1, 2), torch.tensor([[1]], dtype=torch.int32)
        >>> weight = torch.arange(4.0).reshape(2, 1, 2)  # two experts
        >>> ark.expert_linear(x, weight, experts).eval()
        tensor([[[5.]]])
    """
    if isinstance(weight, ExpertWeight):
        return weight.expert_linear(input, experts, output, name)
    x, w, chosen = as_tensor(input), as_tensor(weight), as_tensor(experts)
    dtype = float_dtype("expert_linear", x)
    quantised = isinstance(w.ir.dtype, RowType)
    if not quantised:
        float_dtype("expert_linear", w)
    if chosen.ir.dtype != int32 or (w.ir.dtype != dtype and dtype != fp32 and not quantised):
        raise ModelError(
            f"expert_linear: the input is {dtype.name}, the weight {w.ir.dtype.name}, the experts "
            f"{chosen.ir.dtype.name}; the input must be fp32 or have the type of the weight, and "
            "the experts must be int32"
        )
    shapes = (x.ir.shape, w.ir.shape, chosen.ir.shape)
    fits = len(shapes[1]) == 3 and len(shapes[2]) == 2 and len(shapes[0]) in (2, 3)
    if (
        not fits
        or shapes[0][:-1] != shapes[2][: len(shapes[0]) - 1]
        or shapes[0][-1] != shapes[1][2]
    ):
        raise ModelError(
            f"expert_linear: the input has shape {list(shapes[0])}, the weight {list(shapes[1])}, "
            f"the experts {list(shapes[2])}; expected (rows, k) or (rows, slots, k), (experts, n, "
            "k) and (rows, slots)"
        )
    held, count = w.ir.shape[0], w.ir.shape[0] if of is None else of
    if not 0 <= first <= count - held:
        raise InvalidUsageError(
            f"expert_linear: the weight contains {held} experts with the numbers from {first} on, "
            f"but there are {count} experts, numbered 0 to {count - 1}"
        )
    if not w.ir.dense:
        raise ModelError("expert_linear: the weight must be dense; ark.copy it")
    label = name or w.ir.name.rpartition(".")[2]
    shape = (*chosen.ir.shape, w.ir.shape[1])
    attrs = {"first": int(first), "of": int(count)} if count > held else {}
    return result("expert_linear", [x, w, chosen], shape, dtype, output, attrs=attrs, name=label)


def _topk(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, given = inputs[0], TopKAttributes.from_node(attrs)
    if given.row_softmax:
        powers = np.exp(x - x.max(-1, keepdims=True))
        x = powers / powers.sum(-1, keepdims=True)
    odd, least = np.isnan(x), given.least
    keys = np.where(odd, 0.0, x if least else -x), odd if least else ~odd
    order = np.lexsort(keys, axis=-1)[:, : given.k]
    values = np.take_along_axis(x, order, -1)
    if given.softmax:
        values = np.exp(values - values.max(-1, keepdims=True))
        values /= values.sum(-1, keepdims=True)
    return [values, order]


def _expert_linear(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, weight, experts, *others = inputs
    if x.ndim == 2:
        x = np.broadcast_to(x[:, None], (*experts.shape, x.shape[-1]))
    given = ExpertLinearAttributes.from_node(attrs)
    own = experts.astype(np.int64) - given.first
    held = (own >= 0) & (own < len(weight))
    if not given.of:
        held |= True  # an expert out of range raises IndexError
    chosen = np.where(held, own, 0)
    weights = [weight, *others[: given.weights - 1]]
    products = [np.einsum("rsk,rsnk->rsn", x, w[chosen]) for w in weights]
    result = np.where(held[..., None], products[0], 0)
    if given.expr is not None:
        first, last = given.weights - 1, given.weights - 1 + given.tables
        tables, scores = others[first:last], others[last : last + given.scores]
        leaves = [*products, *(table[chosen] for table in tables), *scores]
        result = np.broadcast_to(expression.evaluate(given.expr, leaves), products[0].shape)
    if given.total:
        result = result.sum(1)
    return [result + others[-1] if given.residual else result]


register("topk", _topk, lower_topk, aliasing="none")
register("expert_linear", _expert_linear, lower_expert_linear, aliasing="none")
