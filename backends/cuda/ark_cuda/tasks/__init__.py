"""Task bodies that live on NVIDIA's own units, by task kind; chosen before the common ones."""

from __future__ import annotations

from collections.abc import Mapping

from ark.codegen.dialect import BodyWriter

BODIES: Mapping[str, BodyWriter] = {}
