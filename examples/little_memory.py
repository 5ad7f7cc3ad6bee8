"""How much memory a model really needs: the same GPUs with less and less of it, until nothing fits.

python examples/little_memory.py [MODEL]
"""

import sys
from dataclasses import replace

import gdp

graph = gdp.load(sys.argv[1] if len(sys.argv) > 1 else "onnx:light_vgg19")
cluster = gdp.Cluster.load("2xt4-pcie4")
search = gdp.Search(seed=0, seconds=None, evaluations=100)

for mib in (1024, 512, 400, 300):
    devices = tuple(replace(device, memory_bytes=mib << 20) for device in cluster.devices)
    box = replace(cluster, devices=devices)
    try:
        result = gdp.place(graph, box, search=search)
    except gdp.InfeasibleError as error:
        print(f"{mib} MiB a GPU: {error}")
        break
    peaks = ", ".join(
        f"{name} {peak / 2**20:.0f} MiB" for name, peak in result.to_json()["peak_bytes"].items()
    )
    print(f"{mib} MiB a GPU: {result.value_s * 1e3:.2f} ms ({peaks})")
