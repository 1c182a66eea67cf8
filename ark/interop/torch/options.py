"""ark.torch.Options: how many iterations, replicas and batches a call of a model has. Called by
users, through ark.interop, and by iterate.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ark
from ark.errors import InvalidUsageError

MODES = ("all", "final", "sum", "every")


@dataclass(frozen=True)
class Options:
    """Options of ark.inference_model and ark.training_model. PopTorch's names are in brackets.

    device_iterations [deviceIterations]: the number of iterations of one launch. replication
    [replicationFactor]: the number of copies of the model (replicas). Each replica has its own
    input rows, and the gradients of all replicas are averaged. In a job of several ranks, the
    replicas are divided equally among the ranks, and a rank is called with the rows of its own
    replicas. With replication 1 the ranks are independent. gradient_accumulation
    [Training.gradientAccumulation]: the number of batches whose gradients are averaged for one
    update. output_mode [outputMode]: selects the iterations whose results are returned: "all",
    "final" for the last one, "sum" for the sum over all, or "every" for each `every`-th one. The
    default is "all", in training "final".

    Examples:
        >>> ark.torch.Options(device_iterations=4, output_mode="sum").device_iterations
        4
    """

    device_iterations: int = 1
    replication: int = 1
    gradient_accumulation: int = 1
    output_mode: Literal["all", "final", "sum", "every"] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("device_iterations", "replication", "gradient_accumulation", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise InvalidUsageError(f"{name}={value!r} must be an integer of at least 1")
        if self.output_mode not in (None, *MODES):
            raise InvalidUsageError(
                f"output_mode is {self.output_mode!r}; it must be one of {', '.join(MODES)}"
            )
        if self.every > 1 and self.output_mode != "every":
            raise InvalidUsageError('every requires output_mode="every"')
        if self.device_iterations % self.every:
            raise InvalidUsageError(
                f"every={self.every} must divide device_iterations={self.device_iterations}"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks that share the replicas. Raises InvalidUsageError if they cannot be
        divided.
        """
        world = ark.Model.get_world_size()
        if self.replication == 1:
            return 1
        if self.replication % world:
            raise InvalidUsageError(
                f"replication={self.replication} is not divisible by the {world} ranks of the "
                "job; use a multiple, or 1 for independent ranks"
            )
        return world

    @property
    def shares(self) -> int:
        """The number of batches that this rank computes in an iteration: its replicas times the
        accumulated batches.
        """
        return self.replication // self.ranks * self.gradient_accumulation
