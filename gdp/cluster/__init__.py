"""The machine that runs it."""

from gdp.cluster.detect import local_cluster
from gdp.cluster.file import load_cluster
from gdp.cluster.types import Cluster

Cluster.load = staticmethod(load_cluster)
Cluster.local = staticmethod(local_cluster)
