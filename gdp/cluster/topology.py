"""Links from the text that `nvidia-smi topo -m` prints."""

import re

from gdp.cluster.types import Link
from gdp.errors import ClusterError

# One direction. NV#: bonded NVLinks of 25 GB/s each (NVLink 2 to 4: NVIDIA V100, A100 and H100
# datasheets, 50 GB/s per link both ways). The rest starts from PCIe 4 x16; what host bridges and
# the interconnect between sockets take off is an assumption, to be overridden in a TOML file.
NVLINK_BYTES_PER_S = 25e9
PATHS = {
    "PIX": (31.5e9, 8e-6),
    "PXB": (28e9, 9e-6),
    "PHB": (25e9, 10e-6),
    "NODE": (22e9, 11e-6),
    "SYS": (16e9, 13e-6),
}


def read_topology(text: str, names: list[str]) -> list[Link]:
    """The links among the GPUs of a `nvidia-smi topo -m` matrix, named in order by `names`.

    Empty text has no links. Raises `ClusterError` when the matrix and `names` disagree or a cell
    is unknown. Pairs that cross sockets (SYS) share one channel each way.
    """
    rows = [
        line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV|P|N|S)", line)
    ]
    if not rows:
        return []
    if len(rows) != len(names):
        raise ClusterError(f"the topology has {len(rows)} GPUs, the cluster {len(names)}")
    links = []
    for i, row in enumerate(rows):
        for j, cell in enumerate(row[1 : len(rows) + 1]):
            if i != j:
                links.append(_link(names[i], names[j], cell))
    return links


def _link(src: str, dst: str, cell: str) -> Link:
    if match := re.fullmatch(r"NV(\d+)", cell):
        return Link(src, dst, int(match[1]) * NVLINK_BYTES_PER_S, 5e-6, one_way=True)
    if cell not in PATHS:
        raise ClusterError(
            f"topology: {src} to {dst} is {cell!r}; known are NV#, {', '.join(PATHS)}"
        )
    bandwidth, latency = PATHS[cell]
    channel = "socket" if cell == "SYS" else f"{src} out"
    return Link(src, dst, bandwidth, latency, channel=channel, one_way=True)
