"""Compares figures with those of a row's file, and chooses between two measurements of one figure.
Called by ci/figures.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from figure_file import Figures

from ark.cli.measure.results import Figure, Results

MAX_TIME_RATIO = 1.03
# Times of requests to a server depend on other processes of the host. So only medians are compared,
# with a larger tolerance. The 99th percentile is not: of 64 requests it is the slowest one.
REQUESTS, MEDIAN, MAX_REQUEST_TIME_RATIO = "serve/", "-p50", 1.2


def worse(before: Figures, runs: Sequence[Results], noisy: bool) -> list[tuple[Figure, Figure]]:
    """Returns the figures that are more than 3% worse than before on the same machine (medians of
    requests: more than 20%), each with its earlier value. Compares times or, on a noisy machine,
    ratios to the peer's time in the same run.
    """
    old = {(f.figure, f.peer): (f, r.machine.name) for r in before.runs for f in r.figures}
    slower = []
    for run in runs:
        for row in run.figures:
            was, name = old.get((row.figure, row.peer), (None, ""))
            if was is None or not was.us or not row.us or name != run.machine.name:
                continue
            requests = row.figure.startswith(REQUESTS)
            if requests and not row.figure.endswith(MEDIAN):
                continue
            most = MAX_REQUEST_TIME_RATIO if requests else MAX_TIME_RATIO
            if noisy:
                slow = bool(row.ratio and was.ratio and row.ratio * most < was.ratio)
            else:
                slow = row.us > was.us * most
            if slow:
                slower.append((row, was))
    return slower


def taken_out(runs: Iterable[Results], names: set[str]) -> tuple[list[Results], list[Results]]:
    """The runs without the named figures, and these figures alone. Runs without figures are left
    out.
    """
    kept, out = [], []
    for run in runs:
        for listed, wanted in ((kept, False), (out, True)):
            figures = [f for f in run.figures if (f.figure in names) == wanted]
            if figures:
                listed.append(run.holding(figures))
    return kept, out


def fastest(first: Sequence[Results], second: Sequence[Results]) -> list[Results]:
    """Of two measurements of figures, the faster one of each figure. Figures that only one of them
    has are kept.
    """

    def times(runs: Sequence[Results]) -> dict[tuple[str, str], float]:
        return {(f.figure, f.peer): f.us for run in runs for f in run.figures if f.us}

    before, after = times(first), times(second)
    chosen = []
    for runs, own, other in ((first, before, after), (second, after, before)):
        for run in runs:
            figures = []
            for f in run.figures:
                key = (f.figure, f.peer)
                mine, its = own.get(key, float("inf")), other.get(key, float("inf"))
                if mine < its or (mine == its and runs is first):
                    figures.append(f)
            if figures:
                chosen.append(run.holding(figures))
    return chosen
