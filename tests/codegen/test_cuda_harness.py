"""The harness of test_cuda_device emits and compiles its kernels. This test keeps it working on
machines without a GPU.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from ark.backend import registry
from tests.codegen.cuda_protocol import Streams
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")


class Tables:
    """A device that accepts the tables and the program of a kernel, and runs nothing."""

    def __init__(self):
        self.machine = registry.machine("h100")
        self.compiled = []

    def alloc(self, nbytes, kind):
        return SimpleNamespace(address=4096, nbytes=nbytes, host=np.zeros(int(nbytes), np.uint8))

    def write(self, address, values):
        pass

    def zero(self, address, nbytes):
        pass

    def load(self, binary):
        self.compiled.append(binary)

    def launch(self, program, params, grid):
        return grid


FEW = ("block", "roles0", "roles9")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v.name, marks=[slow] * (v.name not in FEW))
        for v in registry.machine("h100").variants
    ],
)
def test_tasks_by_hand_compile(variant):
    if variant == "matrix":
        pytest.skip("its loading warpgroup takes boxes, which this harness does not make")
    device = Tables()
    machine = device.machine.using(variant)
    streams = Streams(device, 4, machine)
    grid = streams.job.start()
    assert len(device.compiled) == 1 and grid.processors == 4
    assert grid.threads == machine.threads and grid.shared_bytes > machine.ring_bytes


def test_form_for_racecheck_lets_every_lane_arrive():
    from tests.sanitizer.model import every_lane

    dialect = registry.get("cuda").dialect("sm_90a")
    changed = every_lane(dialect)
    alone = "if (ark_lane() == 0) ark_barrier_arrive("
    assert dialect.roles.count(alone) == 3 and alone not in changed.roles
    assert changed.roles.count("32u * ARK_WARPS)") == 3 and "32u * ARK_WARPS)" in changed.stream
