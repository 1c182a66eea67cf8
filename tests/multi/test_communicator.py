"""Ranks that make different calls: every rank gets an error that names both calls within the
group's timeout, and the next matching call works.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import ark
from ark.distributed.board import CHAIN_BITS, WORDS_PER_RANK, Board, chained, fingerprint, word_of
from ark.distributed.communicator import Frame, Talk
from ark.distributed.statements import Elsewhere, StatedCall, Statement, agreed, error, fails
from tests.slow import examples, slow

Call = tuple[str, Callable[[], Any]]
COUNTS = (4, 8)
TYPES = ((np.float32, "fp32"), (np.int32, "int32"), (np.float64, "fp64"))


def collectives() -> list[Call]:
    """Returns calls that differ in one or several properties, by their names in errors."""
    comm = ark.distributed
    calls: list[Call] = [("barrier()", comm.barrier)]
    for (dtype, name), count in itertools.product(TYPES, COUNTS):
        x = np.ones(count, dtype)
        of = f"{name}[{count}]"
        for op in ("sum", "max"):
            calls.append(
                (f"all_reduce({of}, op='{op}')", lambda x=x, op=op: comm.all_reduce(x, op))
            )
        calls.append((f"all_gather({of})", lambda x=x: comm.all_gather(x)))
        calls.append((f"all_to_all({of})", lambda x=x: comm.all_to_all(x)))
        for root in (0, 1):
            text = f"broadcast({of}, root={root})"
            calls.append((text, lambda x=x, root=root: comm.broadcast(x, root)))
        calls.append(
            (f"reduce_scatter({of}, op='sum')", lambda x=x: comm.reduce_scatter(x)),
        )
    calls.append(("all_reduce(fp32[0], op='sum')", lambda: comm.all_reduce(np.ones(0, np.float32))))
    return calls


def mismatched(pairs: int, seed: int) -> None:
    import ark.distributed

    ark.init(backend="cpu")
    ark.distributed.group(timeout_s=60.0)
    rank, x = ark.Model.get_rank(), np.arange(8, dtype=np.float32)
    calls, order = collectives(), random.Random(seed)
    for _ in range(pairs):
        pair = order.sample(calls, 2)
        for _, call in order.sample(calls, order.randrange(3)):  # right ones before
            call()
        with pytest.raises(ark.InvalidUsageError, match="do not make the same calls") as caught:
            pair[rank][1]()
        for each, (text, _) in enumerate(pair):
            assert f"rank {each} calls {text}" in str(caught.value)
        np.testing.assert_array_equal(ark.distributed.all_reduce(x), 2 * x)


def test_both_calls_of_a_mismatched_pair_are_named() -> None:
    assert ark.launch(2, mismatched, examples(200), 5) == 0


@slow
def test_both_calls_of_ten_thousand_mismatched_pairs_are_named() -> None:
    assert ark.launch(2, mismatched, 10_000, 6) == 0


def one_of_three() -> None:
    """The body of each of three ranks: one rank makes another call than the other two; later rank 0
    makes two calls in the opposite order.
    """
    import ark.distributed

    ark.init(backend="cpu")
    ark.distributed.group(timeout_s=60.0)
    rank, x = ark.Model.get_rank(), np.ones(6, np.float32)
    for odd in range(3):
        with pytest.raises(ark.InvalidUsageError) as caught:
            ark.distributed.all_reduce(x, "max" if rank == odd else "sum")
        assert f"rank {odd} calls all_reduce(fp32[6], op='max')" in str(caught.value)
        assert "all_reduce(fp32[6], op='sum')" in str(caught.value)  # of the others, who has come
        assert list(ark.distributed.all_reduce(x)) == [3.0] * 6
    swapped = [lambda: ark.distributed.broadcast(x, 0), lambda: ark.distributed.all_gather(x)]
    for call in swapped:
        call()
    for call in swapped if rank else swapped[::-1]:
        with pytest.raises(ark.InvalidUsageError, match="do not make the same calls"):
            call()
    assert list(ark.distributed.all_reduce(x)) == [3.0] * 6


def test_one_rank_of_three_makes_another_call() -> None:
    assert ark.launch(3, one_of_three) == 0


def lengths_that_differ() -> None:
    import ark.distributed

    ark.init(backend="cpu")
    x = np.ones(8, np.float32)
    receive = [4, 3] if ark.Model.get_rank() == 0 else [4, 4]
    message = "rank 1 sends 4 rows to rank 0, which receives 3"
    with pytest.raises(ark.InvalidUsageError, match=message):
        ark.distributed.all_to_all_v(x, [4, 4], receive)
    assert list(ark.distributed.all_reduce(x)) == [2.0] * 8


def test_lengths_that_two_ranks_do_not_share_are_an_error_on_both() -> None:
    assert ark.launch(2, lengths_that_differ) == 0


def failing_alone() -> None:
    """The body of each rank: a call that raises an error on one rank raises an error on the other
    rank too, and the ranks continue with later calls.
    """
    import ark.distributed
    from ark.distributed import calls

    ark.init(backend="cpu")
    rank, x = ark.Model.get_rank(), np.ones(8, np.float32)
    ark.distributed.all_reduce(x)
    plans_for = calls.plans_for
    if rank == 1:
        calls.plans_for = _no_memory
    with pytest.raises(ark.SystemError, match="the test lets this allocation fail"):
        ark.distributed.all_reduce(x, "max")
    calls.plans_for = plans_for
    assert list(ark.distributed.all_reduce(x, "max")) == [1.0] * 8


def _no_memory(*_: Any) -> Any:
    raise ark.SystemError("the test lets this allocation fail")


def test_call_that_fails_on_one_rank_fails_on_all() -> None:
    assert ark.launch(2, failing_alone) == 0


TIMEOUT_S = 1.5
LIMIT_S = 20.0  # for a busy machine; without a bound it is 100 s and more


def unanswered() -> None:
    """Makes calls that the other rank does not answer: for each kind of call, a first call, and a
    call after an answered call of that kind.
    """
    import ark.distributed

    ark.init(backend="cpu")
    ark.distributed.group(timeout_s=TIMEOUT_S)
    rank, comm = ark.Model.get_rank(), ark.comm
    x = np.ones(8, np.float32)
    pair = {
        "send": lambda: comm.send(x, 1 - rank),
        "recv": lambda: comm.recv(x.copy(), 1 - rank),
    }
    if rank == 0:
        comm.send(x, 1)
        comm.recv(x.copy(), 1)
    else:
        comm.recv(x.copy(), 0)
        comm.send(x, 0)
    for count in (8, 3):  # 8: sent before
        x = np.ones(count, np.float32)
        for name, call in pair.items():
            began = time.monotonic()
            with pytest.raises(ark.SystemError) as caught:
                call()
            assert time.monotonic() - began < LIMIT_S
            message = str(caught.value)
            assert f"rank {rank} called {name}(fp32[{count}], peer={1 - rank})" in message
            assert f"rank {1 - rank} did not take part" in message
            assert list(comm.all_reduce(x)) == [2.0] * count
    named = dict(collectives())
    for text in ("barrier()", "all_reduce(fp32[8], op='sum')", "broadcast(fp32[8], root=0)"):
        call = named[text]
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(ark.SystemError, match=r"rank 1 did not take part") as caught:
                call()
            assert f"rank 0 called {text} and waited for 1.5 s" in str(caught.value)
        else:
            while comm.group()._all_ranks.failure() is None and time.monotonic() < began + LIMIT_S:
                time.sleep(0.01)
            with pytest.raises(ark.SystemError, match="rank 0 called"):
                comm.all_reduce(x)  # the late rank gets the error
        assert time.monotonic() - began < LIMIT_S
        assert list(comm.all_reduce(x)) == [2.0] * len(x)


def test_no_call_waits_longer_than_the_timeout() -> None:
    assert ark.launch(2, unanswered) == 0


def test_fingerprints_depend_on_all_earlier_calls() -> None:
    """The board is shared memory in which the ranks of a host publish a hash of the calls that they
    have made so far. It tells a rank whether the other rank makes the same call: before, during and
    after a call, and also after every slot of the board has been used once.
    """
    one, other = Board(), Board()
    one.map(other.handle)
    other.map(one.handle)
    chains = [0, 0]
    for number in range(1, 2 * WORDS_PER_RANK + 3):
        for each, board in enumerate((one, other)):
            text = "max" if (each, number) == (1, 2 * WORDS_PER_RANK) else "sum"
            chains[each] = chained(chains[each], fingerprint(text))
            board.post(number, word_of(number, chains[each]))
            mine = word_of(number, chains[each])
            equal = chains[0] == chains[1]
            assert board.complete(number, mine) == (each == 1 and equal)
            assert board.differs(number, mine) == (each == 1 and not equal)
    assert not equal
    for board in (one, other):
        board.close()


def test_board_without_a_peer_compares_nothing() -> None:
    board = Board()
    board.map("0:0")
    board.map("words")
    board.post(1, 7)
    assert board.complete(1, 7) and not board.differs(1, 7)
    board.close()
    board.post(2, 7)
    assert word_of(1 << CHAIN_BITS, 5) == 5


def stated(*texts: str, inside: bool = True, **more: Any) -> Statement:
    chain, result = 0, []
    for number, text in enumerate(texts, 1):
        chain = chained(chain, fingerprint(text))
        result.append(StatedCall(number, chain, text))
    return Statement(
        result, inside, more.get("away", []), more.get("before", ""), more.get("why", "")
    )


def test_statements_describe_mismatched_calls() -> None:
    statements = {0: stated("a", "b"), 1: stated("a", "c")}
    assert agreed(statements) == 1
    assert "rank 0 calls b; rank 1 calls c" in str(error(statements, [0, 1], 3.0))
    ahead = {0: stated("a", "b"), 1: stated("a", inside=False)}
    assert agreed(ahead) == 1 and fails(ahead, 0) and fails(ahead, 1)
    assert "rank 1 did not take part (its last call was a)" in str(error(ahead, [0, 1], 3.0))
    away = {0: stated("a"), 1: stated(inside=False, away=[Elsewhere("recv", [0, 1])])}
    assert fails(away, 0) and not fails(away, 1)  # it waits for rank 0, so its own call ends too
    assert "rank 1 did not take part, and is in recv" in str(error(away, [0, 1], 3.0))
    beside = {0: stated("a"), 1: stated(inside=False, away=[Elsewhere("recv", [1, 2])])}
    assert fails(beside, 1)
    silent = {0: stated("a"), 2: stated("a")}
    message = str(error(silent, [0, 1, 2], 3.0))
    assert "ranks 0 and 2 called a" in message and "rank 1 does not answer" in message
    broken = {0: stated("a", why="rank 0 reports: no memory"), 1: stated("a")}
    assert "called a, which did not end: rank 0 reports: no memory" in str(
        error(broken, [0, 1], 3.0)
    )


def statement_while_inside(last: str) -> str | None:
    """Returns the error that one of two ranks gets in its second call, "b", after the other rank
    has stated its calls, the last of which is `last`.
    """
    job = types.SimpleNamespace(
        rank=1, failure=lambda: None, count=lambda _: 0, hear=lambda *_: None, post=lambda *_: None
    )
    communicator = Talk(job, "calls", 60.0).communicator("all", [0, 1])  # type: ignore[arg-type]
    other = stated(*last.split())
    frame = Frame("all", [0, 1], 0, 0, "", "statement", msgspec.msgpack.encode(other))
    heard: list[str | None] = []

    def run() -> None:
        communicator.hear(0, frame)
        heard.append(communicator.failure())

    communicator.make("a", fingerprint("a"), False, lambda: None)
    with contextlib.suppress(ark.SystemError):
        communicator.make("b", fingerprint("b"), False, run)
    with pytest.raises(ark.BaseError):
        communicator.make("d", fingerprint("d"), False, lambda: None)
    return heard[0]


def test_completed_call_succeeds_although_the_next_calls_differ() -> None:
    assert statement_while_inside("a b c") is None
    assert statement_while_inside("a b") is not None  # it gave up in that call
    assert statement_while_inside("a c d") is not None
    assert statement_while_inside("a") is not None


def alone(count: int) -> None:
    """The body of each of two ranks: rank 1 leaves after a call, and rank 0 makes another one."""
    import ark.distributed

    ark.init(backend="cpu")
    ark.distributed.group(timeout_s=2.0)
    ark.distributed.all_reduce(np.ones(8, np.float32))
    if ark.Model.get_rank() == 0:
        with pytest.raises(ark.SystemError) as caught:
            ark.distributed.all_reduce(np.ones(count, np.float32))
        call = f"all_reduce(fp32[{count}], op='sum')"
        assert str(caught.value).startswith(f"rank 0 called {call}, which did not end: rank 1")
        assert "has left" in str(caught.value)


@pytest.mark.parametrize("count", [8, 9])  # of a call that was made before, and of a new one
def test_call_that_a_rank_makes_after_another_has_left(count: int) -> None:
    assert ark.launch(2, alone, count) == 0


def fifty_kinds() -> None:
    """The body of each rank: makes more kinds of calls than are cached, with a mismatch in between.
    All ranks must drop the same calls from their caches.
    """
    import ark.distributed

    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    for count in (*range(1, 40), 7, 39, *range(30, 75), 2):
        x = np.ones(count, np.float32)
        assert list(ark.distributed.all_reduce(x)) == [2.0] * count
        if count % 25 == 0:
            with pytest.raises(ark.InvalidUsageError):
                ark.distributed.all_reduce(x, "max" if rank else "min")


@slow
def test_plans_are_evicted_after_a_mismatch() -> None:
    assert ark.launch(2, fifty_kinds) == 0


if __name__ == "__main__":
    sys.exit(ark.launch(2, mismatched, int(sys.argv[1]), 6))
