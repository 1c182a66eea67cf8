"""What the ranks of a lane tell each other when a call of one of them cannot go on, and the error
that all of them make of it. Called by ark.distributed.lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ark.errors import BaseError, InvalidUsageError, SystemError


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call. number: from 1, since the lane's ranks last agreed; chain: see ark.distributed.board;
    text: the call as a person writes it.
    """

    number: int
    chain: int
    text: str


class Elsewhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of another lane that a rank is in, and that lane's ranks."""

    text: str
    ranks: list[int]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's side.

    calls: its latest ones. inside: the last of them has not returned. elsewhere: the calls of other
    lanes that it is in. before: its last call before these. reason: why it cannot go on, where it
    is more than that others did not come.
    """

    calls: list[Made]
    inside: bool
    elsewhere: list[Elsewhere]
    before: str
    reason: str

    @property
    def last(self) -> int:
        """The number of the latest call, 0 before the first."""
        return self.calls[-1].number if self.calls else 0

    def is_past(self, number: int, chain: int) -> bool:
        """Whether the rank has returned from that call: it made the same one and a later one."""
        same = {call.number: call.chain for call in self.calls}.get(number, chain) == chain
        return same and self.last > number


def agreed(statements: Mapping[int, Statement]) -> int:
    """Up to which number all ranks have made the same calls."""
    least = min(s.last for s in statements.values())
    known = [{c.number: c.chain for c in s.calls} for s in statements.values()]
    while least and len({calls.get(least) for calls in known} - {None}) > 1:
        least -= 1
    return least


def fails(statements: Mapping[int, Statement], rank: int) -> bool:
    """Does what happened end a call of this rank's, the one that it is in or its next? Not where it
    is in a call of another lane that waits for a rank that waits here: that call ends.
    """
    own = statements[rank]
    waiting = {each for each, said in statements.items() if said.inside}
    stuck = any(waiting.intersection(other.ranks) for other in own.elsewhere)
    return own.inside or own.last > agreed(statements) or not stuck


def error(statements: Mapping[int, Statement], ranks: Sequence[int], waited_s: float) -> BaseError:
    """The same error on all ranks that have heard the same statements. ranks: all of the lane."""
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
    return SystemError(f"{texts}, which did not end: {'; '.join(reasons) or 'no rank says why'}")


def _whereabouts(statement: Statement | None) -> str:
    if statement is None:
        return "does not answer"
    if statement.elsewhere:
        calls = " and ".join(each.text for each in statement.elsewhere)
        return f"did not make its part, and is in {calls}"
    last = statement.calls[-1].text if statement.calls else statement.before
    return f"did not make its part ({f'its last call was {last}' if last else 'it made none'})"


def _by_text(texts: Mapping[int, str]) -> str:
    """Equal texts once: "rank 0 calls x; ranks 1 and 2 call y"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    said = []
    for text, each in ranks.items():
        *first, last = map(str, each)
        names = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
        said.append(f"{names} {_plural(text) if first else text}")
    return "; ".join(said)


def _plural(text: str) -> str:
    verbs = {"calls": "call", "does": "do"}
    verb, _, rest = text.partition(" ")
    return f"{verbs.get(verb, verb)} {rest}"
