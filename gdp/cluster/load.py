"""A cluster by what a user writes: a file, or the name of a preset."""

import os
from pathlib import Path

from gdp.cluster.file import read_cluster
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster


def load_cluster(spec: str | os.PathLike[str]) -> Cluster:
    """The cluster of a TOML file, or of a preset such as "2xcpu-core" or "4xa100-nvlink".

    Raises `ClusterError` where there is no such file or preset, or the file is malformed.
    """
    path = Path(spec)
    if path.suffix == ".toml" or path.exists():
        return read_cluster(path)
    return cluster_preset(str(spec))
