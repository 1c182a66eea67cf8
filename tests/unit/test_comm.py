"""The names in ark.comm. The collectives on arrays still have names there, which are deprecated."""

import warnings

import pytest

import ark
import ark.comm
import ark.distributed


@pytest.mark.parametrize("name", ark.distributed.__all__)
def test_collectives_on_arrays_are_deprecated_names_of_comm(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"use ark\.distributed\.{name}$") as caught:
        function = getattr(ark.comm, name)
    assert function is getattr(ark.distributed, name)
    assert caught[0].filename == __file__


def test_other_names_of_comm_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ark.comm.__all__:
            assert getattr(ark.comm, name)
        assert not hasattr(ark.comm, "gather")
