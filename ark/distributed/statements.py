"""Statements by which ranks report their latest calls to each other. When a call cannot continue,
the ranks exchange statements, and every rank derives the same error from all of them. Called by
ark.distributed.communicator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ark.errors import BaseError, InvalidUsageError, SystemError


class StatedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in a statement. number: the call's number, counted from 1 since the communicator was
    created or started anew after an error. chain: the fingerprint of all calls up to this one
    (ark.distributed.board). text: the call as shown in errors.
    """

    number: int
    chain: int
    text: str


class Elsewhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the rank has not returned from and that belongs to another communicator. ranks:
    the ranks of that communicator.
    """

    text: str
    ranks: list[int]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's report.

    calls: the rank's latest calls on this communicator. inside: True if the rank has not returned
    from the last of them. elsewhere: calls on other communicators from which the rank has not
    returned. before: the last call before the communicator was last reset after an error. reason:
    why the rank cannot continue, if the cause is something other than calls that other ranks have
    not made.
    """

    calls: list[StatedCall]
    inside: bool
    elsewhere: list[Elsewhere]
    before: str
    reason: str

    @property
    def last(self) -> int:
        """The number of the latest call, 0 before the first."""
        return self.calls[-1].number if self.calls else 0

    def is_past(self, number: int, chain: int) -> bool:
        """True if the rank has returned from the call with this number and fingerprint (`chain`).
        This is known if the rank has made a later call.
        """
        same = {call.number: call.chain for call in self.calls}.get(number, chain) == chain
        return same and self.last > number


def agreed(statements: Mapping[int, Statement]) -> int:
    """The number of the last call up to which all ranks have made the same calls."""
    least = min(s.last for s in statements.values())
    known = [{c.number: c.chain for c in s.calls} for s in statements.values()]
    while least and len({calls.get(least) for calls in known} - {None}) > 1:
        least -= 1
    return least


def fails(statements: Mapping[int, Statement], rank: int) -> bool:
    """True if, according to the statements, a call of this rank must raise an error: the call that
    the rank is in or, if it is in none, its next call. False if the rank is in a call on another
    communicator, and a rank of that communicator waits in a call on this one. The call on the other
    communicator then raises the error instead.
    """
    own = statements[rank]
    waiting = {each for each, statement in statements.items() if statement.inside}
    stuck = any(waiting.intersection(other.ranks) for other in own.elsewhere)
    return own.inside or own.last > agreed(statements) or not stuck


def error(statements: Mapping[int, Statement], ranks: Sequence[int], waited_s: float) -> BaseError:
    """The error that ends the call. It is equal on all ranks that received the same statements.
    ranks: the ranks of the communicator. waited_s: the time limit that the error names.
    """
    same = agreed(statements)
    following = {r: c for r, s in statements.items() for c in s.calls if c.number == same + 1}
    if len({call.chain for call in following.values()}) > 1:
        calls = _by_text({rank: f"calls {call.text}" for rank, call in following.items()})
        return InvalidUsageError(
            f"the ranks do not make the same calls: {calls}; all ranks must make the same calls, "
            "with equal types, sizes and arguments, in the same order"
        )
    reasons = [s.reason for _, s in sorted(statements.items()) if s.reason]
    if following and len(following) < len(ranks) and not reasons:
        waiting = _by_text({rank: f"called {call.text}" for rank, call in following.items()})
        away = {r: _whereabouts(statements.get(r)) for r in ranks if r not in following}
        return SystemError(
            f"{waiting} and waited for {waited_s:g} s; {_by_text(away)}; all ranks must make the "
            "same calls, or wait longer for each other (the group's timeout)"
        )
    latest = {r: c for r, s in statements.items() for c in s.calls[-1:]}
    texts = _by_text({rank: f"called {call.text}" for rank, call in latest.items()})
    silent = [r for r in ranks if r not in statements]
    if silent:
        reasons.append(_by_text(dict.fromkeys(silent, "does not answer")))
    return SystemError(
        f"{texts}, which did not end: {'; '.join(reasons) or 'no rank reported a reason'}"
    )


def _whereabouts(statement: Statement | None) -> str:
    if statement is None:
        return "does not answer"
    if statement.elsewhere:
        calls = " and ".join(each.text for each in statement.elsewhere)
        return f"did not take part, and is in {calls}"
    last = statement.calls[-1].text if statement.calls else statement.before
    return f"did not take part ({f'its last call was {last}' if last else 'it made none'})"


def _by_text(texts: Mapping[int, str]) -> str:
    """The ranks and texts as one clause, in which ranks with equal texts are joined: "rank 0 calls
    x; ranks 1 and 2 call y".
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    joined = []
    for text, each in ranks.items():
        *first, last = map(str, each)
        names = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
        joined.append(f"{names} {_plural(text) if first else text}")
    return "; ".join(joined)


def _plural(text: str) -> str:
    verbs = {"calls": "call", "does": "do"}
    verb, _, rest = text.partition(" ")
    return f"{verbs.get(verb, verb)} {rest}"
