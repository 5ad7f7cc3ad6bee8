"""Clusters by file or by name of a preset."""

import os
from pathlib import Path

from gdp.cluster.file import read_cluster
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.errors import ClusterError

Machine = str | os.PathLike[str] | Cluster
"""Argument for a cluster of every library call."""


def load_cluster(spec: Machine) -> Cluster:
    """Load a cluster.

    Args:
        spec: TOML file, preset such as "2xcpu-core" or "4xa100-nvlink", or a cluster, which is
            returned as it is.

    Raises:
        ClusterError: if there is no such file or preset, or the file is malformed.
    """
    if isinstance(spec, Cluster):
        return spec
    _require_path(spec)
    path = Path(spec)
    if path.suffix == ".toml" or path.exists():
        return read_cluster(path)
    return cluster_preset(str(spec))


def _require_path(spec: object) -> None:
    if not isinstance(spec, str | os.PathLike):
        raise ClusterError(
            "a cluster is a TOML file, a preset such as 2xcpu-core, or what gdp.Cluster.load, "
            f"gdp.Cluster.local or gdp.make_cluster return, not of type {type(spec).__name__}"
        )
