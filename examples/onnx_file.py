"""An ONNX model, placed on two cores for throughput and exported: cut into sub-models, replicated
where that is faster.

    python examples/onnx_file.py [MODEL.onnx] [FOLDER]

The folder, a new temporary one unless named, then holds one ONNX file per segment, a manifest, and
`run.py`, which needs no gdp.
"""

import sys
import tempfile
from pathlib import Path

import gdp

model = sys.argv[1] if len(sys.argv) > 1 else "onnx:light_squeezenet"
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "cut"

graph = gdp.load(model)
cluster = gdp.Cluster.load("2xcpu-core")
search = gdp.Search(seed=0, seconds=None, evaluations=200)  # the same answer on every machine
result = gdp.place(graph, cluster, objective="throughput", search=search)

print(
    f"{graph.name}: {result.value_s * 1e3:.2f} ms a sample, "
    f"at most {result.gap:.1%} from the optimum"
)
for name, ops in result.to_json()["devices"].items():
    print(f"  {name}: {ops} ops")

for path in gdp.export(result.placement, model, "onnxruntime", folder, cluster):
    print(path)
