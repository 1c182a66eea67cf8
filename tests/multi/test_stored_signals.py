"""Ranks that signal over links with loads and stores but without atomic read-modify-write
operations. A signal is then a store.

The emulated devices stop a kernel that uses another operation on such a link.
"""

from __future__ import annotations

import functools
import json
from contextlib import ExitStack
from importlib import resources

import numpy as np
import pytest

from ark.backend import registry
from ark.backend.codegen import layout
from ark.backend.codegen.constants import constants
from ark.backend.codegen.dialect import Source
from ark.backend.devices import Device
from ark.backend.protocol import KernelBackend
from ark.cli.doctor import bench as benches
from ark.cli.doctor.bench import Bench
from ark.errors import GpuError, PlanError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.runtime.admission import admit
from tests.cases.channels import BY_STORES, PROGRAMS, put_then_signal, run, wanted
from tests.cases.collectives import build, check_collectives, short_suite
from tests.cases.generate_ranks import NOAH, alone, start
from tests.slow import SLOW, slow

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

LAUNCH_ITERATIONS = 4
SEEDS = {"gfx942": 8, "gfx1100": 40}  # RDNA waits for loads and stores separately


def opened(arch: str, stack: ExitStack, **options: int) -> tuple[list[Device], Machine]:
    """Opens two devices whose link has only loads and stores."""
    stack.enter_context(emulator.emulated(arch, 2, stores_only=1, compute_units=3, **options))
    result = [registry.get("rocm").open(rank) for rank in range(2)]
    for device in result:
        stack.callback(device.close)
    return result, result[0].machine


def adding(machine: Machine) -> Machine:
    """Returns the machine with links that support all operations, atomic additions included."""
    return machine.without_capabilities(Capability.PEER_STORES)


@pytest.mark.parametrize("arch", ["gfx1100", pytest.param("gfx942", marks=slow)])
@pytest.mark.parametrize("option", ["checks", "stale"])
def test_channels(arch: str, option: str) -> None:
    with ExitStack() as stack:
        result, machine = opened(arch, stack, **{option: 1})
        assert machine.has(Capability.PEER_STORES)
        for body in PROGRAMS if SLOW else BY_STORES:
            got = run(build(2, body, machine), "rocm", result, LAUNCH_ITERATIONS)
            np.testing.assert_array_equal(got, wanted(len(got), LAUNCH_ITERATIONS), body.__name__)


@slow
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_collectives(arch: str) -> None:
    with ExitStack() as stack:
        check_collectives("rocm", 2, *opened(arch, stack, checks=1), short_suite)


def test_atomics_over_links_without_them_stop_the_kernel() -> None:
    with ExitStack() as stack:
        result, machine = opened("gfx1100", stack, report=0)
        plans = build(2, put_then_signal, adding(machine))
        with pytest.raises(GpuError):
            run(plans, "rocm", result, LAUNCH_ITERATIONS, budget_s=2.0)
        kinds = {failure.kind for failure in emulator.failures()}
        assert emulator.ErrorKind.LINK in kinds


def test_plan_with_atomic_signals_is_refused() -> None:
    """A plan whose ranks signal by atomic additions is refused on a machine whose links support
    stores only. Such a plan comes from a machine model with other links.
    """
    product = registry.machine("rx7900xtx")
    plans = build(2, put_then_signal, product.with_processors(4))
    admit(plans, product)
    lacking = product.with_capabilities(Capability.PEER_STORES)
    with pytest.raises(PlanError, match="support stores only"):
        admit(plans, lacking)


STORING = """
ARK_DEVICE void ark_run(const ArkParams* p, ark_u32, char*) {
  const ark_u64 count = p->counter_ops;
  const ArkCounterOp e{p->tasks, 1u, static_cast<ark_u32>(count), static_cast<ark_u32>(count >> 32),
                       9u};
  for (ark_u32 i = 0u; ark_tid() == 0 && i < p->barrier_step; ++i) ark_signal_stored(e);
}
"""


def storing(machine: Machine, backend: KernelBackend) -> Source:
    """Returns the source of a kernel in which all processors signal one counter of a peer by
    stores.
    """
    dialect = backend.dialect(machine.arch)
    device = resources.files("ark.backend.codegen").joinpath("device")
    loop = [device.joinpath(name).read_text() for name in ("wait.h", "task_slots.h")]
    constant = constants(machine, 1, layout.LOOP_BYTES, signals=2)
    parts = (constant, dialect.prelude, layout.declarations(), *loop, STORING, dialect.entry)
    return Source("\n".join(parts))


def stored(bench: Bench, rounds: int) -> int:
    """Runs the kernel for some rounds and returns the final value of the peer's counter."""
    word, count = bench.words(1, "symmetric"), bench.words(1)
    bench.finish(bench.start("add", data=word.address, words=count.address, rounds=rounds))
    return int(bench.device.read(word.address, 4).view(np.uint32)[0])


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_last_store_has_the_sum_of_all_signals(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that signal one counter by stores overtake each other between counting and
    storing. The last store still has the final value.
    """
    monkeypatch.setattr(benches, "source", storing)
    compiled = functools.cache(registry.with_kernels(registry.get("rocm")).compiler().compile)
    monkeypatch.setattr("ark_rocm.compiler.Compiler.compile", lambda _, *of: compiled(*of))
    for seed in range(SEEDS[arch]):
        options = {"stale": 1, "seed": seed, "max_slice": 4, "compute_units": 6}
        with emulator.emulated(arch, 1, **options), Bench(registry.get("rocm"), 0) as bench:
            assert stored(bench, rounds=5) == 5 * bench.processors


@slow
def test_decoder_in_two_processes() -> None:
    """A decoder in two processes whose link supports stores only. Memory mapped from another
    process counts as a peer's.
    """
    words = ("--json", "--backend", "rocm", "--ranks", "2", "--max-new-tokens", "3")
    link = {"ARK_ROCM_DEVICE": "emulated:gfx1100,2", "ARK_ROCM_EMULATOR_STORES_ONLY": "1"}
    process = start(NOAH, *words, "--budget", "120", **link)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["tokens"] == alone(NOAH, 3)
