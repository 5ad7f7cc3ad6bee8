"""Profiles: what is written comes back, and merging keeps what was least disturbed."""

from pathlib import Path

import numpy as np
import pytest
from made_up import profile, profiled
from msgspec.structs import replace

from gdp.costs.profile import (
    DeviceRecord,
    Overheads,
    ProfileError,
    load_profile,
    merge,
    save_profile,
)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    made = replace(profile(2, 2), overheads=Overheads(session_s=1e-5, handover_s=6e-5))
    for name in ("p.json", "p.json.gz"):
        save_profile(made, tmp_path / name)
        found = load_profile(tmp_path / name)
        assert found.setting == made.setting
        assert found.overheads == made.overheads
        assert [m.graph.digest for m in found.models] == [m.graph.digest for m in made.models]
        for ours, theirs in zip(made.models, found.models, strict=True):
            assert [k.ops for k in ours.kernels] == [k.ops for k in theirs.kernels]
            np.testing.assert_allclose(
                [k.seconds for k in ours.kernels], [k.seconds for k in theirs.kernels], rtol=1e-3
            )


def test_equal_profiles_make_equal_files(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        save_profile(profile(2, 1), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_merging_keeps_the_smaller_time_of_each_kernel() -> None:
    """Kernels of 1 and 4 s, then of 3 and 2 s: 1 and 2 s; the latency is the smaller one."""
    base = profiled("m", "f", [(8, 8, 8), (8, 8, 8)], 0.0, np.random.default_rng(0))

    def measured(first_s: float, second_s: float):
        kernels = tuple(
            replace(k, seconds=s) for k, s in zip(base.kernels, (first_s, second_s), strict=True)
        )
        return replace(base, kernels=kernels, latency_s=first_s + second_s)

    one, two = (replace(profile(1, 1), models=(m,)) for m in (measured(1, 4), measured(3, 2)))
    found = merge([one, two])
    assert len(found.models) == 1
    assert [k.seconds for k in found.models[0].kernels] == [1, 2]
    assert found.models[0].latency_s == 5
    assert found.models[0].rounds == 6


def test_merging_keeps_the_least_latency_and_the_most_bandwidth() -> None:
    one, two = (
        replace(profile(1, 1), overheads=Overheads(session_s=s, handover_bytes_per_s=rate))
        for s, rate in ((1e-5, 1e9), (2e-5, 2e9))
    )
    for found in (merge([one, two]), merge([two, one])):
        assert (found.overheads.session_s, found.overheads.handover_bytes_per_s) == (1e-5, 2e9)
        assert found.overheads.handover_s is None


def test_other_devices_are_not_merged() -> None:
    one = profile(1, 1)
    with pytest.raises(ProfileError, match=r"Made-up avx2.*and.*Other"):
        merge([one, replace(one, device=DeviceRecord("cpu-core", "Other"))])


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{}", "is not a profile"), (b"\x1f\x8bxx", "damaged gzip"), (b"[", "is not a profile")],
)
def test_a_malformed_profile_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(ProfileError, match=message):
        load_profile(tmp_path / "bad.json")


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no profile .*gdp profile"):
        load_profile(tmp_path / "none.json")
