"""The state on the device that the op `sample_adjusted` needs besides ark.ops.tokens.TokenState."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ark.frontend.tensor import Tensor, as_tensor
from ark.ir import values as ir
from ark.ir.dtype import DataType, fp32, int32
from ark.ops.views import new_tensor
from ark.tasks.adjusted import MASK_BITS, OPTIONS


@dataclass(frozen=True)
class SamplingState:
    """The sampling state of `batch` sequences. ark.tasks.adjusted describes it for one sequence.

    options: (batch * len(OPTIONS),) int32, the sampling options. bias: (batch, vocabulary) fp32,
    added to the logits; -inf for tokens that are never sampled. allowed: (batch, vocabulary / 32)
    int32, a bit per token, lowest first; used if the option `masked` is not 0. counts: (batch,
    vocabulary) int32, how often a token occurred. logprobs: (batch * context * (1 + 2 * top),)
    int32, the reported log probabilities, in memory that the host can read.
    """

    options: Tensor
    bias: Tensor
    allowed: Tensor
    counts: Tensor
    logprobs: Tensor

    @classmethod
    def make(cls, context: int, batch: int, vocabulary: int, top: int) -> SamplingState:
        """A new state in the current model. top: the largest number of log probabilities that are
        reported per position, in addition to that of the sampled token.
        """

        def state(name: str, shape: tuple[int, ...], dtype: DataType, arena: str) -> Tensor:
            tensor = new_tensor("SamplingState", arena, shape, dtype, (), (), (), name)
            tensor.rename(name)
            return tensor

        return cls(
            state("options", (batch * len(OPTIONS),), int32, "state"),
            state("bias", (batch, vocabulary), fp32, "state"),
            state("allowed", (batch, -(-vocabulary // MASK_BITS)), int32, "state"),
            state("counts", (batch, vocabulary), int32, "state"),
            state("logprobs", (batch * context * (1 + 2 * top),), int32, "host"),
        )

    def rows(self, part: Callable[[Tensor], Tensor]) -> SamplingState:
        """The state of some of the sequences. part: a function that returns the part of a tensor
        that belongs to these sequences.
        """
        every = (self.options, self.bias, self.allowed, self.counts, self.logprobs)
        return SamplingState(*(part(tensor) for tensor in every))

    @property
    def tensors(self) -> list[ir.Tensor]:
        """All tensors of the state; the op writes the last two."""
        every = (self.options, self.bias, self.allowed, self.counts, self.logprobs)
        return [as_tensor(tensor).ir for tensor in every]
