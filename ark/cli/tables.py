"""Tables of results, in which no word and no number is broken.

If a table is wider than the terminal, each row becomes a line with its name and lines with its
figures, below a header of the same form. Called by the modules of ark.cli that print results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

FIGURES_INDENT_COLUMNS = 2
FIGURES_GAP_COLUMNS = 2  # columns between two figures
FRAME_COLUMNS = 3  # columns of a table's frame beside each of its columns


class FigureTable:
    """A table of figures, which a console prints. left: the number of first columns that name a row
    or are texts; they are aligned to the left, the columns after them to the right. If all heads
    are empty, no header is printed.
    """

    def __init__(self, title: str, heads: Iterable[str], left: int = 1) -> None:
        self.title, self.heads, self.left = title, list(heads), left
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Adds a row; cells that it lacks are empty."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        given = [self.heads, *self.rows]
        longest = [
            max(len(word) for row in given if at < len(row) for word in ("", *row[at].split()))
            for at in range(len(self.heads))
        ]
        if sum(longest) + FRAME_COLUMNS * len(self.heads) + 1 > options.max_width:
            lines = narrow(self.heads, self.rows, self.left, options.max_width)
            yield from map(Text, filter(None, (self.title, *lines)))
            return
        title = self.title or None
        table = Table(title=title, title_justify="left", show_header=any(self.heads))
        for index, head in enumerate(self.heads):
            table.add_column(head, justify="left" if index < self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        yield table


def narrow(
    heads: Sequence[str], rows: Sequence[Sequence[str]], names: int, width: int
) -> Iterator[str]:
    """The lines of a table in the form for narrow terminals."""
    given = [heads, *rows] if any(heads) else rows
    every = [[*row, *[""] * (len(heads) - len(row))] for row in given]
    widths = [max(len(row[at]) for row in every) for at in range(len(heads))]
    groups = _groups(widths[names:], width - FIGURES_INDENT_COLUMNS)
    for row in every:
        yield ", ".join(filter(None, row[:names]))
        for first, last in groups:
            cells = [row[names + at].rjust(widths[names + at]) for at in range(first, last)]
            line = (" " * FIGURES_GAP_COLUMNS).join(cells)
            if line.strip():
                yield " " * FIGURES_INDENT_COLUMNS + line


def _groups(widths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Ranges of neighbouring columns that fit into a line of this width. A wider column has a line
    of its own.
    """
    groups: list[tuple[int, int]] = []
    used = 0
    for at, own in enumerate(widths):
        if groups and used + FIGURES_GAP_COLUMNS + own <= width:
            groups[-1] = (groups[-1][0], at + 1)
            used += FIGURES_GAP_COLUMNS + own
        else:
            groups.append((at, at + 1))
            used = own
    return groups
