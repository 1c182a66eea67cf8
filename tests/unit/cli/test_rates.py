"""`ark generate` prints a rate only if there are enough tokens to measure one."""

from __future__ import annotations

from ark.cli.generate import _rate


def test_no_rate_is_printed_for_few_tokens() -> None:
    assert _rate(0, 0.0) == ""
    assert _rate(15, 0.5) == "; 15 more in 0.50 s"
    assert _rate(16, 0.5) == "; 16 more in 0.50 s, 32.0 tokens/s"
