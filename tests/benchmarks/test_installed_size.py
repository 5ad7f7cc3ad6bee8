"""What the table of an installation counts."""

from benchmarks.installed_size import needed


def test_a_distribution_counts_with_what_it_needs_and_extras_only_when_asked_for() -> None:
    alone = needed("hypothesis")
    assert alone["hypothesis"] > 1_000_000
    assert "sortedcontainers" in alone
    assert "numpy" not in alone
    assert needed("hypothesis", ["numpy"]).keys() > alone.keys()


def test_what_is_not_installed_counts_nothing() -> None:
    assert needed("no-such-distribution-as-this") == {}
