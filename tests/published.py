"""Where the public benchmark instances lie: the folder GDP_BENCH, else beside the checkout."""

import os
from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "bench"
DNN_PARTITIONING = Path(os.environ.get("GDP_BENCH") or _BESIDE) / "dnn_partitioning"
