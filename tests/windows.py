"""Convolutions that read their windows in place, planned for processors that would not do so."""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.ir.graph import Graph
from ark.lower import prepare
from ark.lower.rewrite import channels
from ark.lower.rewrite.windows import read_windows
from ark.machine import Machine


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on graphs are planned as for a machine whose box copies may be of windows, and
    every convolution is worth that.
    """
    boxes = registry.machine("h100").using("matrix")
    given = channels.channels_last

    def windowed(graph: Graph, machine: Machine, kept: frozenset[int]) -> Graph:
        return read_windows(given(graph, boxes, kept), boxes, kept)

    monkeypatch.setattr(channels, "LEAST_WORK", 1)
    monkeypatch.setattr(prepare, "channels_last", windowed)
