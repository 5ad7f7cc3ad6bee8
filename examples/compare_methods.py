"""Methods side by side on one model and machine, with equal budgets, and a placer of one's own
under the same simulator.

    python examples/compare_methods.py [MODEL]
"""

import sys

import numpy as np

import gdp

graph = gdp.load(sys.argv[1] if len(sys.argv) > 1 else "onnx:light_inception_v2")
cluster = gdp.Cluster.load("4xt4-pcie4")
search = gdp.Search(seed=0, seconds=None, evaluations=300)

results = gdp.compare(
    graph, cluster, names=["single", "heft", "etf", "local_search"], search=search
)
for name, result in results.items():
    if isinstance(result, str):  # the reason why the method has no answer
        print(f"{name}: {result}")
    else:
        print(f"{name}: {result.value_s * 1e3:.3f} ms, gap {result.gap:.1%}")

# A placer is any array of devices: here four equal shares of the ops, in topological order.
device = np.arange(graph.num_ops) * cluster.num_devices // graph.num_ops
device[graph.is_io] = cluster.host  # inputs and outputs stay where they come from
mine = gdp.make_placement(graph, cluster, device)
print(f"equal shares: {gdp.simulate(graph, mine, cluster).latency_s * 1e3:.3f} ms")
