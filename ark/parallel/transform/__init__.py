"""Splits a graph over ranks by the primitives op_trans, op_assign and op_order, and builds the
graphs of the ranks.
"""

from ark.parallel.transform.annotations import Annotation, annotate
from ark.parallel.transform.materialise import RankGraphs, materialise, whole_of
from ark.parallel.transform.pieces import ParallelGraph, Piece
from ark.parallel.transform.views import View, part_of, parts_of

__all__ = [
    "Annotation",
    "ParallelGraph",
    "Piece",
    "RankGraphs",
    "View",
    "annotate",
    "materialise",
    "part_of",
    "parts_of",
    "whole_of",
]
