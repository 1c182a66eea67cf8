"""Task bodies that live on NVIDIA's own units, by task kind; chosen before the common ones.

BODIES: their writers. HEADERS: the device code that they stand on. POLLS: what the lead warp of the
variant `roles` waits for. SCRATCH: the shared memory that they need. LOADS: the halves that the
loading thread of the variant `matrix` runs; LOADER: its loop. MOVES: what the warps of that variant
run that move. MAPS: their operands' tensor maps.
Called through the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping

from ark.codegen.dialect import BodyWriter, HeaderRule, LoaderRule, MapRule, ScratchRule
from ark_cuda.tasks import (
    attention,
    attention_tiles,
    bulk,
    linear,
    linear_roles,
    matmul,
    moves,
    products,
    rows,
    switch,
)

BODIES: Mapping[str, BodyWriter] = {
    "attention": attention.write,
    "attention_merge": attention.merge,
    "attention_tiles": attention_tiles.write,
    "bulk": bulk.write,
    "linear": linear.write,
    "matmul": matmul.write,
    "paged_attention": attention.write_paged,
    "rownorm": rows.write,
    "switch": switch.write,
}
HEADERS: Mapping[str, HeaderRule] = {
    "attention": attention.headers,
    "attention_merge": attention.headers,
    "attention_tiles": attention_tiles.headers,
    "bulk": bulk.headers,
    "linear": linear.headers,
    "matmul": matmul.headers,
    "paged_attention": attention.paged_headers,
    "rownorm": rows.headers,
    "switch": switch.headers,
}
POLLS: Mapping[str, BodyWriter] = {
    "attention": attention.poll,
    "attention_merge": attention.merge_poll,
    "linear": linear.poll,
    "paged_attention": attention.poll,
}
LOADS: Mapping[str, BodyWriter] = {"attention_tiles": attention_tiles.load, "matmul": products.load}
MOVES: Mapping[str, BodyWriter] = {"combine": moves.write}
LOADER: LoaderRule = products.loader
MAPS: Mapping[str, MapRule] = {
    "attention_tiles": attention_tiles.maps,
    "linear": linear_roles.maps,
    "matmul": products.maps,
}
SCRATCH: Mapping[str, ScratchRule] = {
    "attention": attention.scratch,
    "attention_tiles": attention_tiles.scratch,
    "bulk": bulk.scratch,
    "linear": linear.scratch,
    "matmul": matmul.scratch,
    "paged_attention": attention.paged_scratch,
    "rownorm": rows.scratch,
}
