"""Lets the planner read the windows of convolutions in place also on processors for which it would
not.
"""

from __future__ import annotations

import dataclasses

import pytest

from ark.backend import registry
from ark.ir.graph import Graph
from ark.lower import prepare
from ark.lower.passes import PASSES, Pass
from ark.lower.rewrite import channels_last as module
from ark.lower.rewrite import convolutions, fuse_windows
from ark.lower.rewrite.context import Context


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on graphs are planned as if the machine's box copies could load windows, and as if
    this paid off for every convolution.
    """
    boxes = registry.machine("h100").using("matrix")
    boxes = dataclasses.replace(boxes, costs=dataclasses.replace(boxes.costs, turned_work=1.0))
    given = module.channels_last
    for user in (convolutions, fuse_windows):
        monkeypatch.setattr(user, "window_cuts", lambda *_: ["any number of columns"])

    def channels_last(graph: Graph, context: Context) -> Graph:
        boxed = dataclasses.replace(context, machine=boxes)
        return fuse_windows.fuse_windows(given(graph, boxed), boxed)

    def windowed(step: Pass) -> Pass:
        named = step.name == given.__name__
        return dataclasses.replace(step, run=channels_last) if named else step

    monkeypatch.setattr(prepare, "PASSES", tuple(windowed(step) for step in PASSES))
