import ark


def test_version_is_a_release_number():
    assert len(ark.__version__.split(".")) == 3
