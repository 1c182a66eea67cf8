"""The synchronisation of the loop kernel on a real NVIDIA GPU: stages, packets, counters, stops and
errors.

The plans are written by hand, so that only the device ABI, the loop, the ring and the device object
are involved. Expected values come from NumPy. The tests are skipped without a GPU, and fail without
one if ARK_REQUIRE demands it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from ark.backend.codegen import layout
from ark.backend.protocol import Target
from ark.errors import GpuError, SystemError
from ark.machine.variant import block

pytest.importorskip("cuda.bindings.driver")

from ark_cuda import backend

from tests.codegen.cuda_protocol import Job, Streams, download, upload

GPU = bool(backend.probe().devices)
if not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"):
    pytest.skip(f"no NVIDIA GPU: {backend.probe().reason}", allow_module_level=True)


@pytest.fixture(scope="module")
def device():
    opened = backend.open(0)
    yield opened
    opened.close()


def machines_to_try(device):
    ring = device.machine
    direct = dataclasses.replace(ring, variants=(block(16),))
    shallow = ring.shaped(stages=3, in_flight=2)
    few_warps = ring.shaped(roles=block(5, 1).roles, in_flight=4)
    return {"ring": ring, "direct": direct, "shallow": shallow, "few_warps": few_warps}


@pytest.mark.parametrize("which", ["ring", "direct", "shallow", "few_warps"])
def test_stages_packets_and_counters(device, which):
    machine = machines_to_try(device)[which]
    streams = Streams(device, device.machine.processors, machine, limit=6, phase0=2)
    for _ in range(3):
        launch = streams.job.run()
        streams.check(6, 2)
    assert launch.elapsed_ms() > 0.0


def test_stop_ends_the_loop_on_the_device(device):
    streams = Streams(device, device.machine.processors, limit=9, phase0=2, end=4)
    streams.job.run()
    streams.check(5, 2)


def test_host_feeds_a_persistent_loop(device):
    streams = Streams(device, device.machine.processors, limit=7, phase0=2, persistent=1)
    launch = streams.job.start()
    mail = streams.job.mail
    for target in (1, 4, 7):
        mail["target"] = target
        deadline = time.monotonic() + 10.0
        while mail["done"] < target:
            assert time.monotonic() < deadline, "the loop did not follow the host"
        time.sleep(0.002)
        assert mail["done"] == target and not launch.done()
    mail["quit"] = 1
    assert launch.wait(10.0)
    streams.check(7, 2)


def test_idle_persistent_loop_leaves(device):
    streams = Streams(device, 4, limit=1, persistent=1)
    launch = streams.job.start(idle_s=0.05)
    assert launch.wait(10.0)
    assert streams.job.mail["quit"] == 1 and streams.job.mail["error"] == 0


@pytest.mark.parametrize("ring", [True, False])
def test_deadlock_ends_in_the_mailbox(device, ring):
    machine = machines_to_try(device)["ring" if ring else "direct"]
    streams = Streams(device, device.machine.processors, machine, limit=3, phase0=3, extra_wait=1)
    streams.job.run(budget_s=0.2)
    mail = streams.job.mail
    # The error names the task whose wait timed out, or a task that depends on it. It never names a
    # task that only waits for the next iteration.
    assert layout.ERROR_KINDS[int(mail["error"])] == "counter"
    assert mail["error_expected"] == mail["error_seen"] + 1
    # The process can continue to use the device.
    healthy = Streams(device, device.machine.processors, machine, limit=3, phase0=3)
    healthy.job.run()
    healthy.check(3, 3)


def test_unconsumed_stages_are_reported_in_the_mailbox(device):
    if not device.machine.ring_bytes:
        pytest.skip("this GPU reads operands in place")
    streams = Streams(device, 8, limit=6, phase0=6, skip=True)
    streams.job.run(budget_s=0.2)
    assert layout.ERROR_KINDS[int(streams.job.mail["error"])] in ("operand stream", "counter")


def test_stage_larger_than_a_slot_is_refused(device):
    if not device.machine.ring_bytes:
        pytest.skip("this GPU reads operands in place")
    machine = device.machine.shaped(stage_bytes=8192, stages=24)
    streams = Streams(device, 8, machine, limit=1, phase0=1)
    streams.job.run(budget_s=0.2)
    mail = streams.job.mail
    assert layout.ERROR_KINDS[int(mail["error"])] == "operand stream"
    assert (mail["error_expected"], mail["error_seen"]) == (8192, 3 * 1023 * 4)


def test_host_can_abort(device):
    streams = Streams(device, 8, limit=3, phase0=3, extra_wait=1)
    launch = streams.job.start(budget_s=60.0)
    time.sleep(0.05)
    assert not launch.done()
    streams.job.mail["abort"] = 1
    assert launch.wait(5.0)


def test_conversions_round_as_numpy_does(device):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 50000, np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], np.array([0.0, -0.0, np.inf, 65519.9, 65520.0, 6e-8])])
    x = x.astype(np.float32)
    half, bfloat = (
        upload(device, np.zeros(len(x), np.uint16)),
        upload(device, np.zeros(len(x), np.uint16)),
    )
    back = upload(device, np.zeros(2 * len(x), np.float32))
    task = {
        "op": 0, "operands": [upload(device, x), half, bfloat, back], "coord": [len(x)],
        "signals": [(0, 0)],
    }  # fmt: skip
    Job(device, [("probe_convert", {})], [[[task]]]).run()
    with np.errstate(over="ignore"):
        halves, bfloats = x.astype(np.float16), x.astype(ml_dtypes.bfloat16)
    got = device.read(half, 2 * len(x)).view(np.float16)
    np.testing.assert_array_equal(got, halves)
    got = device.read(bfloat, 2 * len(x)).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.astype(np.float32), bfloats.astype(np.float32))
    pairs = download(device, back, (len(x), 2))
    np.testing.assert_array_equal(pairs[:, 0], halves.astype(np.float32))
    np.testing.assert_array_equal(pairs[:, 1], bfloats.astype(np.float32))


def test_too_many_blocks_are_refused(device):
    streams = Streams(device, 8)
    streams.job.phases = [streams.job.phases[0] * 1000]
    with pytest.raises(SystemError, match="resident"):
        streams.job.start()


def test_too_little_memory_says_asked_and_free(device):
    with pytest.raises(SystemError, match=r"MiB of device memory were asked for, .* are free"):
        device.alloc(1 << 45, "device")


def test_binary_for_another_architecture_is_refused(device):
    from ark.backend.protocol import Source

    source = Source('extern "C" __global__ void ark_loop() {}')
    with pytest.raises(SystemError, match="loading a loop kernel"):
        device.load(backend.compiler().compile(source, Target("sm_120", 32)))


CHILD = """
import sys
import numpy as np
from ark_cuda import backend
device = backend.open(0)
memory = device.map_peer(bytes.fromhex(sys.argv[1]))
assert (device.read(memory.address, 8) == np.arange(8, dtype=np.uint8)).all()
device.write(memory.address + 8, np.full(8, 7, np.uint8))
device.free(memory)
device.close()
"""


def test_symmetric_memory_reaches_another_process(device):
    memory = device.alloc(64, "symmetric")
    device.write(memory.address, np.arange(8, dtype=np.uint8))
    handle = device.export(memory)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, handle.hex()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    assert (device.read(memory.address + 8, 8) == 7).all()
    same = device.map_peer(handle)
    assert same.address == memory.address
    with pytest.raises(SystemError, match="handle"):
        device.map_peer(b"nonsense")
    with pytest.raises(GpuError, match="symmetric"):
        device.export(device.alloc(64, "device"))
