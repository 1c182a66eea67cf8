"""The boxes (rectangles of indices) of each operand that the tasks of an op access, as arrays.

Boxes are relative to an operand's first element, so ops with equal signatures, such as equal layers
of a model, share the arrays. ark.plan.access adds the positions of the operands. A box that several
tasks touch is stored once. Called by lowering, the scheduler and the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ark.errors import PlanError
from ark.ir.values import row_major
from ark.plan import kind as kinds
from ark.plan.kind import Access, Signature
from ark.plan.types import Fetch, Items

MIN_BOX_DIMS = 4  # fewest dimensions of a box
Coords = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Boxes:
    """All reads, or all writes, of one operand by an op's tasks.

    Task tasks[i] touches box number box[i]. Boxes are distinct; tasks are in rising order. lo, hi:
    arrays of shape (boxes, dimensions) with the first index of each box in each dimension, and the
    last index + 1. They count items (elements, or bytes of several elements for 4-bit types).
    begin, end: arrays of shape (boxes,) with the first byte of each box, and the last byte + 1.
    Indices and bytes are relative to the operand's first item. append_only, appended, claimed: see
    ark.plan.kind.Access.
    """

    operand: int
    write: bool
    append_only: bool
    appended: tuple[int, int]
    claimed: bool
    itemsize: int
    tasks: np.ndarray
    box: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    met: dict[object, object] = field(default_factory=dict)  # results of ark.plan.access

    @property
    def dims(self) -> int:
        """The number of dimensions of the boxes. In a box with fewer dimensions, dimensions of size
        1 are added in front.
        """
        return int(self.lo.shape[1])

    @cached_property
    def first(self) -> int:
        return int(self.begin.min())

    @cached_property
    def last(self) -> int:
        return int(self.end.max())

    @cached_property
    def single(self) -> bool:
        return len(self.lo) == 1

    @cached_property
    def solid(self) -> np.ndarray:
        """True for each box whose elements are consecutive bytes in memory."""
        sizes = np.prod(self.hi - self.lo, axis=1) * self.itemsize
        return np.asarray(sizes == self.end - self.begin)

    @cached_property
    def all_solid(self) -> bool:
        return bool(self.solid.all())

    @cached_property
    def by_box(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays: all tasks, sorted by the box that they access; and for each box the index in
        the first array at which its tasks begin.
        """
        order = np.argsort(self.box, kind="stable")
        starts = np.searchsorted(self.box[order], np.arange(len(self.lo) + 1))
        return self.tasks[order], starts

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bounding box of all boxes: its first indices, and its last indices + 1."""
        return tuple(self.lo.min(axis=0).tolist()), tuple(self.hi.max(axis=0).tolist())

    @cached_property
    def volume(self) -> int:
        """The sum of the sizes of all boxes. Elements in several boxes are counted several
        times.
        """
        return int(np.prod(self.hi - self.lo, axis=1).sum())

    @cached_property
    def fills_span(self) -> bool:
        """True if the boxes cover all bytes between the first byte of any box and the last byte of
        any box, each byte exactly once.
        """
        return self.volume * self.itemsize == self.last - self.first and self.disjoint

    @cached_property
    def fills_bounds(self) -> bool:
        """True if the boxes cover all elements of their bounding box, each element exactly once."""
        low, high = (np.array(v) for v in self.bounds)
        return self.volume == int(np.prod(high - low)) and self.disjoint

    @cached_property
    def sharpest(self) -> int:
        """The dimension in which the boxes have the most different first indices. Comparing boxes
        in this dimension first excludes the most pairs.
        """
        return int(np.argmax([len(np.unique(self.lo[:, d])) for d in range(self.dims)]))

    @cached_property
    def disjoint(self) -> bool:
        """True where no two boxes share an element."""
        if self.single:
            return True
        cuts = self._cuts()
        if np.prod([len(c) for c in cuts]) > 64 * len(self.lo) + 4096:
            return not any(len(rows) for rows, _ in overlaps(self.lo, self.hi, self.sharpest))
        return int(self._depth(cuts).max()) <= 1

    @cached_property
    def union(self) -> int:
        """The number of elements that are in at least one box."""
        if self.disjoint:
            return self.volume
        cuts = self._cuts()
        met = self._depth(cuts) > 0
        for d, cut in enumerate(cuts):
            met = met * np.append(np.diff(cut), 0).reshape(
                [-1 if d == e else 1 for e in range(self.dims)]
            )
        return int(met.sum())

    def _cuts(self) -> list[np.ndarray]:
        """For each dimension, the indices at which boxes begin or end."""
        return [np.unique(np.concatenate((self.lo[:, d], self.hi[:, d]))) for d in range(self.dims)]

    def _depth(self, cuts: list[np.ndarray]) -> np.ndarray:
        """For each cell of a grid, the number of boxes that contain it. The grid has a line at
        every index at which some box begins or ends, in each dimension, so a box contains whole
        cells only.
        """
        shape = tuple(len(c) for c in cuts)
        depth = np.zeros(shape, np.int64)
        ends = [
            (np.searchsorted(c, self.lo[:, d]), np.searchsorted(c, self.hi[:, d]))
            for d, c in enumerate(cuts)
        ]
        for corner in range(1 << self.dims):
            sides = [corner >> d & 1 for d in range(self.dims)]
            sign = -1 if sum(sides) % 2 else 1
            np.add.at(depth, tuple(e[s] for e, s in zip(ends, sides, strict=True)), sign)
        for d in range(self.dims):
            np.cumsum(depth, axis=d, out=depth)
        return depth


def candidates(
    lo_a: np.ndarray, hi_a: np.ndarray, lo_b: np.ndarray, hi_b: np.ndarray, most: int = 1 << 20
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (i, j) such that range i of a may overlap range j of b. The result has all overlapping
    pairs, and possibly pairs that do not overlap. It is returned in pieces of about `most` pairs to
    bound the memory. Internally the ranges of b are sorted, so that the candidates for a range of a
    are consecutive.
    """
    order = np.argsort(lo_b, kind="stable")
    reach = np.maximum.accumulate(hi_b[order])
    last = np.searchsorted(lo_b[order], hi_a, "left")
    first = np.minimum(np.searchsorted(reach, lo_a, "right"), last)
    many = last - first
    ends = np.cumsum(many)
    pieces, at = [], 0
    while at < len(many):
        base = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, base + most, "right")))
        counts = many[at:stop]
        rows = np.repeat(np.arange(at, stop), counts)
        place = np.arange(len(rows)) - np.repeat(ends[at:stop] - counts - base, counts)
        pieces.append((rows, order[np.repeat(first[at:stop], counts) + place]))
        at = stop
    return pieces


def overlaps(lo: np.ndarray, hi: np.ndarray, axis: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The pairs (i, j), i < j, of boxes that share an element. They are returned in several arrays,
    which bounds the memory. axis: the dimension that is compared first.
    """
    pairs = []
    for rows, columns in candidates(lo[:, axis], hi[:, axis], lo[:, axis], hi[:, axis]):
        keep = rows < columns
        rows, columns = rows[keep], columns[keep]
        meet = ((lo[rows] < hi[columns]) & (lo[columns] < hi[rows])).all(axis=1)
        pairs.append((rows[meet], columns[meet]))
    return pairs


class Templates:
    """A cache of the boxes and streamed bytes of ops, which are computed once for each signature
    and list of coordinates.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[object, Coords], tuple[Boxes, ...]] = {}
        self._streams: dict[tuple[object, Coords], tuple[tuple[Fetch, ...], ...]] = {}
        self._whole: dict[tuple[object, ...], Boxes] = {}

    def boxes(self, sig: Signature, coords: Coords) -> tuple[Boxes, ...]:
        """The boxes that the op's tasks access, for each operand and for reads and writes. Raises
        PlanError if the task kind does not accept the coordinates.
        """
        key = (sig.key, coords)
        boxes = self._boxes.get(key)
        if boxes is None:
            boxes = self._boxes[key] = _boxes(sig, coords)
        return boxes

    def streams(self, sig: Signature, coords: Coords) -> tuple[tuple[Fetch, ...], ...]:
        """For each task, the bytes of operands that are copied to shared memory before the task
        starts (its fetches).
        """
        key = (sig.key, coords)
        streams = self._streams.get(key)
        if streams is None:
            kind = kinds.get(sig.kind)
            shared: dict[tuple[Fetch, ...], tuple[Fetch, ...]] = {}
            fetches = (kind.stream(sig, coord) for coord in coords)
            streams = self._streams[key] = tuple(shared.setdefault(f, f) for f in fetches)
        return streams

    def whole(self, items: Items, itemsize: int, count: int) -> Boxes:
        """The memory accesses of `count` tasks, each of which reads a whole operand of `items`
        items.
        """
        key = (items.shape, items.extents, itemsize, count)
        boxes = self._whole.get(key)
        if boxes is None:
            access = Access(0, (0,) * len(items.shape), items.shape)
            rows = [(i, 0) for i in range(count)]
            strides = row_major(items.extents)
            boxes = self._whole[key] = tile_boxes(
                access, rows, [(access.lo, items.shape)], strides, itemsize
            )
        return boxes


_Way = tuple[int, bool, bool, tuple[int, int], bool]  # an access without its box


def _boxes(sig: Signature, coords: Coords) -> tuple[Boxes, ...]:
    kind = kinds.get(sig.kind)
    grouped: dict[_Way, tuple[list[tuple[int, int]], dict[object, int]]] = {}
    first: dict[_Way, Access] = {}
    for task, coord in enumerate(coords):
        try:
            accesses = kind.accesses(sig, coord)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PlanError(
                f"coordinates {list(coord)} do not fit the task kind {sig.kind!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        for access in accesses:
            way = access.operand, access.write, access.append_only
            key = (*way, access.appended, access.claimed)
            if key not in grouped:
                grouped[key] = ([], {})
                first[key] = access
            rows, known = grouped[key]
            box = (access.lo, access.hi)
            rows.append((task, known.setdefault(box, len(known))))
    result = []
    for key, (rows, known) in sorted(grouped.items(), key=lambda kv: kv[0]):
        if not 0 <= key[0] < len(sig.operands):
            raise PlanError(
                f"a task of kind {sig.kind!r} accesses operand number {key[0]}, but the op has "
                f"{len(sig.operands)} operands"
            )
        operand = sig.operands[key[0]]
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = list(known)  # type: ignore[arg-type]
        for lo, hi in boxes:
            inside = len(lo) == len(hi) == len(operand.shape) and all(
                0 <= a < b <= n for a, b, n in zip(lo, hi, operand.shape, strict=True)
            )
            if not inside:
                raise PlanError(
                    f"a task of kind {sig.kind!r} accesses the indices {list(lo)} to {list(hi)} "
                    f"of operand {key[0]}, whose shape is {list(operand.shape)}"
                )
        each, strides = operand.per_item, operand.strides
        if each > 1:  # several elements share a byte, so boxes are counted in bytes
            boxes = [
                ((*lo[:-1], lo[-1] // each), (*hi[:-1], -(-hi[-1] // each))) for lo, hi in boxes
            ]
            strides = (*(s // each for s in strides[:-1]), 1)
        result.append(tile_boxes(first[key], rows, boxes, strides, operand.itemsize))
    return tuple(result)


def tile_boxes(
    access: Access,
    rows: Sequence[tuple[int, int]],
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    strides: Sequence[int],
    itemsize: int,
) -> Boxes:
    rank = len(strides)
    dims = max(MIN_BOX_DIMS, rank)
    steps = np.zeros(dims, np.int64)
    lo = np.zeros((len(boxes), dims), np.int64)
    hi = np.ones((len(boxes), dims), np.int64)
    if rank:
        steps[dims - rank :] = strides
        lo[:, dims - rank :] = [b[0] for b in boxes]
        hi[:, dims - rank :] = [b[1] for b in boxes]
    table = np.array(rows, np.int64)
    return Boxes(
        operand=access.operand,
        write=access.write,
        append_only=access.append_only,
        appended=access.appended,
        claimed=access.claimed,
        itemsize=itemsize,
        tasks=table[:, 0],
        box=table[:, 1],
        lo=lo,
        hi=hi,
        begin=(lo * steps).sum(axis=1) * itemsize,
        end=(((hi - 1) * steps).sum(axis=1) + 1) * itemsize,
    )
