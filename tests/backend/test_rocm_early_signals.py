"""Layers of several rows on AMD devices, which signal before their task's record in shared memory
ends (backends/rocm/ark_rocm/tasks/prefetch.h).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ark_cpu import backend as cpu
from ark_rocm import backend as rocm

from ark.cli.measure.decode import fill_caches, random_weights
from ark.ir.dtype import bf16
from ark.models.build import Shape
from ark.models.config import LlamaConfig, builtin_config
from ark.models.plans import plans
from ark.models.sampling import GREEDY
from ark.models.sequences import write_sequences
from ark.runtime.executor import Executor

emulator = pytest.importorskip("ark_rocm_emulator")

ROWS, CONTEXT, LIMIT = 8, 20, 26  # sequences, tokens of each before the launch and at most


def small() -> LlamaConfig:
    return dataclasses.replace(
        builtin_config("llama-3.2-1b"),
        num_hidden_layers=1,
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_ids=(),
    )


def decode(backend: Any, device: Any) -> npt.NDArray[Any]:
    """The tokens of all sequences after launches of one and of three iterations."""
    shape = Shape(small(), bf16, LIMIT, 0, batch=ROWS)
    (plan,) = plans(shape, device.machine, None)
    text = [i * 31 % 97 + 1 for i in range(CONTEXT)]
    with Executor(plan, backend, device) as executor:
        for name, array in random_weights(plan, shape.config):
            executor.write(name, array)
        fill_caches(executor, plan)
        texts = [[*text, 100 + 7 * row] for row in range(ROWS)]
        write_sequences(executor, shape, texts, [LIMIT] * ROWS, GREEDY, (), CONTEXT)
        for iterations in (1, 3):
            executor.start(iterations).wait(3000)
        return executor.read("tokens")


def test_records_signal_again_in_the_next_iteration() -> None:
    """On 304 compute units a processor has so few tasks that their records stay in shared memory
    between iterations. If a record were not restored, the second iteration would wait for ever.
    """
    with (
        emulator.emulated("gfx942", compute_units=304),
        contextlib.closing(rocm.open(0)) as device,
    ):
        tokens = decode(rocm, device)
    with contextlib.closing(cpu.open(0)) as device:
        np.testing.assert_array_equal(tokens, decode(cpu, device))
