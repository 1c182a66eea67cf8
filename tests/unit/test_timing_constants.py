"""The table of the AMD timing model's constants: each has a source, otherwise the page is not
built.
"""

from __future__ import annotations

import pytest

from tests.cases.ci import load

timing_constants = load("timing_constants")
MODELS = (timing_constants.CORE / "timing_models.cpp").read_text()
SOURCES = (timing_constants.CORE / "timing_sources.toml").read_text()


def test_products_constants_are_read() -> None:
    products = timing_constants.constants(MODELS)
    assert list(products) == ["mi300x", "mi355x"]
    assert products["mi300x"]["memory_width"] == "5300 * 0.81 / 2.1"
    declared = (timing_constants.CORE / "timing.h").read_text()
    assert all(name in declared for name in products["mi300x"]) and len(products["mi300x"]) == 27


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[flush]", "[flushes]", "flush, flushes"),
        ('kind = "fitted"', 'kind = "known"', "needs a source and a kind"),
        (
            'source = "AMD Instinct MI300X and MI355X data sheets"',
            'source = ""',
            "units needs a source",
        ),
    ],
)
def test_constant_without_a_source_is_refused(old: str, new: str, says: str) -> None:
    timing_constants.table(MODELS, SOURCES)
    with pytest.raises(ValueError, match=says):
        timing_constants.table(MODELS, SOURCES.replace(old, new, 1))
    with pytest.raises(ValueError, match="must have the same constants"):
        timing_constants.table(MODELS.replace(".flush =", ".rinse ="), SOURCES)
