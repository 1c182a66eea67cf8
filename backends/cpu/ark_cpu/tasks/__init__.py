"""The CPU's specialised task bodies, one object for each task kind and form. Called through the
dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark_cpu.tasks import matmul

BODIES: tuple[Body, ...] = (matmul.Panels(),)
