"""send and recv with the arguments of ARK 0.5: a message id, a rank and a number of bytes.
Processes are started by ark.launch, on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.errors import BaseError

VECTOR_LENGTH = 300


def ping_pong() -> None:
    """A tensor goes to rank 1 as bytes, and rank 1 sends it back unchanged."""
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    nbytes = VECTOR_LENGTH * ark.fp16.element_size()
    values = np.random.default_rng(0).standard_normal(VECTOR_LENGTH).astype(np.float16)
    if rank == 0:
        sent = ark.tensor([VECTOR_LENGTH], ark.fp16)
        ark.send_done(ark.send(sent, 0, 1, nbytes), 0, 1)
        back = ark.cast(ark.recv(1, 1, bytes=nbytes), ark.fp16)
    else:
        back = ark.cast(ark.recv(0, 0, bytes=nbytes), ark.fp16)
        ark.send_done(ark.send(back, 1, 0, nbytes), 1, 0)
    assert back.shape() == [VECTOR_LENGTH] and back.dtype() == ark.fp16
    with ark.Runtime() as runtime:
        runtime.launch()
        if rank == 0:
            sent.from_numpy(values)
        runtime.barrier()
        runtime.run(2)
        np.testing.assert_array_equal(back.to_numpy(), values)
        runtime.barrier()


def into_a_share() -> None:
    """Sends and receives rows of a larger tensor, with arguments by name. The receiver's next op
    waits for them.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    whole = ark.tensor([8, 24])
    upper, lower = ark.sharding(whole, axis=0, dim_per_shard=4)
    if rank == 0:
        ark.send(lower, id=5, dst_rank=1, bytes=4 * 24 * 4)
        doubled = ark.mul(whole, 2.0)
    else:
        got = ark.recv(id=5, src_rank=0, output=upper)
        assert got.shape() == [4, 24] and got.dtype() == ark.fp32
        doubled = ark.mul(got, 2.0)
    values = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    with ark.Runtime() as runtime:
        runtime.launch()
        whole.from_numpy(values if rank == 0 else np.zeros((8, 24), np.float32))
        runtime.barrier()
        runtime.run()
        wanted = values if rank == 0 else values[4:]
        np.testing.assert_array_equal(doubled.to_numpy(), 2 * wanted)
        runtime.barrier()


@pytest.mark.parametrize("function", [ping_pong, into_a_share])
def test_two_ranks_exchange_bytes(function: object) -> None:
    ark.launch(2, function)


REFUSED = {
    "more bytes than there are": lambda x: ark.send(x, 0, 1, 1000),
    "a word for bytes": lambda x: ark.send(x, id=0, dst_rank=1, bytes="all"),
    "an unknown word": lambda x: ark.send(x, id=0, dst_rank=1, size=4),
    "no rank": lambda x: ark.send(x, id=0, bytes=4),
    "a rank that is not there": lambda x: ark.send(x, 0, 7, 16),
    "neither bytes nor output": lambda x: ark.recv(0, 1),
    "a number below 0": lambda x: ark.recv(0, 1, bytes=-1),
    "columns": lambda x: ark.send(x[:, :2], 0, 1, 16),
    "a word for an id": lambda x: ark.send_done(x, 0, "one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_messages_are_refused(case: str) -> None:
    ark.init()
    ark.set_world_size(2)
    with pytest.raises(BaseError):
        REFUSED[case](ark.tensor([4, 4]))
    ark.init()


def test_bytes_are_seen_as_elements_without_a_copy() -> None:
    ark.init(backend="cpu")
    raw = ark.tensor([2, 8], ark.byte)
    halves, words = ark.cast(raw, ark.fp16), ark.cast(raw[:, 4:], ark.int32)
    as_bytes = ark.cast(ark.mul(halves, 1.0), ark.byte)
    with pytest.raises(ark.ModelError, match="whole elements"):
        ark.cast(raw[:, 1:3], ark.fp32)
    values = np.arange(16, dtype=np.uint8).reshape(2, 8)
    with ark.Runtime() as runtime:
        runtime.launch()
        raw.from_numpy(values)
        runtime.run()
        np.testing.assert_array_equal(halves.to_numpy(), values.view(np.float16))
        np.testing.assert_array_equal(
            words.to_numpy(), np.ascontiguousarray(values[:, 4:]).view("i4")
        )
        np.testing.assert_array_equal(as_bytes.to_numpy(), values)
    ark.init(backend="cpu")
