"""Devices of one's own: a fast GPU with little memory, a slow one with more, and the host."""

import gdp

host = gdp.Device("host", "cpu", {"default": 1e12}, bytes_per_s=100e9, memory_bytes=64 << 30)
fast = gdp.Device("fast", "gpu", {"default": 20e12}, bytes_per_s=600e9, memory_bytes=200 << 20)
slow = gdp.Device("slow", "gpu", {"default": 5e12}, bytes_per_s=300e9, memory_bytes=500 << 20)
pcie = [gdp.Link(a, b, 12e9, 10e-6, channel="pcie") for a, b in
        (("host", "fast"), ("host", "slow"), ("fast", "slow"))]  # fmt: skip
box = gdp.make_cluster("box", [host, fast, slow], pcie, host="host")

graph = gdp.load("onnx:light_vgg19")  # 548 MiB of weights: they fit on no GPU as a whole
constraints = gdp.Constraints(forbid=(gdp.Pin("*", ("host",)),))  # all work on the GPUs
search = gdp.Search(seed=0, seconds=None, evaluations=200)
result = gdp.place(graph, box, search=search, constraints=constraints)

print(f"{graph.name}: {result.value_s * 1e3:.2f} ms, proven at least {result.bound_s * 1e3:.2f} ms")
for device, peak in result.to_json()["peak_bytes"].items():
    print(f"  {device}: {peak / 2**20:.0f} MiB")

try:
    tiny = gdp.Device("fast", "gpu", {"default": 20e12}, bytes_per_s=600e9, memory_bytes=100 << 20)
    gdp.place(graph, gdp.make_cluster("tiny", [host, tiny], pcie[:1]), constraints=constraints)
except gdp.InfeasibleError as error:
    print(error)
