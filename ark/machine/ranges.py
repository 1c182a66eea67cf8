"""Types of the fields of machines and kernel variants, with the range of values that a plan file
may contain.

The dataclasses of ark.machine use these types; ark.plan.schema checks values from files against
them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# A Word may be passed to a compiler as an option, so its characters are restricted. A Name may not.
Word = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:+-]*$")]
Name = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*$")]
Bytes = Annotated[int, Meta(ge=0, le=1 << 30)]
StageBytes = Annotated[int, Meta(ge=16, le=1 << 24)]
MemoryBytes = Annotated[int, Meta(ge=0, le=1 << 44)]
LineBytes = Annotated[int, Meta(ge=4, le=4096, multiple_of=4)]
Count = Annotated[int, Meta(ge=1, le=1 << 14)]
Few = Annotated[int, Meta(ge=0, le=1 << 10)]
Threads = Annotated[int, Meta(ge=1, le=64)]
Rate = Annotated[float, Meta(gt=0.0, le=1e12)]
Work = Annotated[float, Meta(ge=0.0, le=1e12)]
