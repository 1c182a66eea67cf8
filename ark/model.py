"""The model that op calls add to: ARK keeps a current one, and so does ark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ark.ir.model import Graph


class Model:
    """A graph under construction, with the rank it belongs to."""

    _current: Model | None = None
    _rank = 0
    _world_size = 1
    _device_id = 0

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self.graph = Graph(
            Model._rank if rank is None else rank,
            Model._world_size if world_size is None else world_size,
        )

    @staticmethod
    def get_model() -> Model:
        """The current model; made on first use."""
        if Model._current is None:
            Model._current = Model()
        return Model._current

    @staticmethod
    def reset() -> None:
        """Drops the current model."""
        Model._current = None


def set_model(model: Model | None) -> None:
    """Makes `model` the one that op calls add to."""
    Model._current = model


def current_model() -> Model:
    """The model that op calls add to."""
    return Model.get_model()


@contextmanager
def use_model(model: Model) -> Iterator[Model]:
    """Makes `model` current inside a with block."""
    before = Model._current
    Model._current = model
    try:
        yield model
    finally:
        Model._current = before
