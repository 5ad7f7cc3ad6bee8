"""Placing for ONNX Runtime: any placement, but of ops that a provider has no kernel of.

A session computes these on the processor whatever its device, with copies that no plan counts.
Rows are those of ONNX Runtime's table of kernels (`docs/OperatorKernels.md`, commit 001d12d2) and
of `GetCapability` of its CUDA provider (`cuda_execution_provider.cc`, and of ArgMax
microsoft/onnxruntime#22713), read and not run.
"""

import glob
from dataclasses import replace

from gdp.cluster.table import presets
from gdp.cluster.types import Cluster, Device
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.placement.constraints import Pin
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.free import plan_freely

_WITHOUT_CUDA = (
    "Acos Acosh Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Col2Im "
    "ConvInteger Cosh DFT Det GlobalLpPool Hardmax ImageDecoder LpNormalization LpPool MaxRoiPool "
    "MaxUnpool Mean MelWeightMatrix Multinomial NonMaxSuppression QLinearConv QLinearMatMul "
    "RegexFullMatch STFT Sinh SplitToSequence StringConcat StringNormalizer StringSplit Tan "
    "TfIdfVectorizer Unique"
)
WITHOUT_CUDA = frozenset(_WITHOUT_CUDA.split())
"""Ops of ONNX, functions of other ops aside, of which the CUDA provider has no kernel."""


def plan(question: Question) -> Result:
    """The best placement of all in which ops without a CUDA kernel are on a processor."""
    graph, cluster = question.graph, question.cluster
    gpus = tuple(device.name for device in cluster.devices if _is_cuda(device))
    without = dict[int, str]()  # ops without a CUDA kernel, and the attribute that has none
    for i, (kind, detail) in enumerate(zip(graph.op_types, graph.detail, strict=True)):
        lacks = kind if kind in WITHOUT_CUDA else _lacking_attribute(kind, detail)
        if gpus and lacks:
            without[i] = lacks
    if without and any(device.is_cpu for device in cluster.devices):
        forbid = tuple(Pin(glob.escape(graph.op_names[i]), gpus) for i in without)
        limits = replace(question.constraints, forbid=(*question.constraints.forbid, *forbid))
        question = replace(question, constraints=limits)
    result = plan_freely(question)
    return replace(result, notes=(*result.notes, *_notes(graph, cluster, without)))


def _is_cuda(device: Device) -> bool:
    preset = presets().get(device.kind)
    return preset is not None and preset.maker == "nvidia"


def _lacking_attribute(kind: str, detail: OpDetail) -> str:
    """An op with the attribute that its CUDA kernel lacks; "" where it has all."""
    given = detail.attributes
    lacks = ""
    if kind in ("ArgMax", "ArgMin") and given.get("select_last_index"):
        lacks = "select_last_index"
    elif kind == "ConvTranspose":
        pads = given.get("pads")
        pads = tuple(pads) if isinstance(pads, tuple | list) else ()
        half = len(pads) // 2
        if given.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
            lacks = "auto_pad"
        elif pads[:half] != pads[half:]:
            lacks = "unequal pads"
    elif kind in ("LSTM", "GRU", "RNN"):
        named = ("activation_alpha", "activation_beta", "clip")
        lacks = next((name for name in named if name in given), "")
        if kind == "LSTM" and given.get("input_forget"):
            lacks = "input_forget"
        if kind == "GRU" and given.get("linear_before_reset", 1) != 1:
            lacks = "linear_before_reset 0"
    return f"{kind} with {lacks}" if lacks else ""


def _notes(graph: OpGraph, cluster: Cluster, without: dict[int, str]) -> list[str]:
    """Notes on ops without a kernel, and on checks that were not made."""
    notes = list[str]()
    if without:
        first = next(iter(without))
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        notes.append(
            f"ONNX Runtime's CUDA provider has no kernel of {graph.op_names[first]} "
            f"({without[first]}){more}: the processor computes what has none"
        )
    others = dict.fromkeys(d.kind for d in cluster.devices if not d.is_cpu and not _is_cuda(d))
    checked = any(_is_cuda(device) for device in cluster.devices)
    if others:
        notes.append(
            f"not checked: kernels of ONNX Runtime's providers for {', '.join(others)}; ops "
            "without one are computed by the processor, with copies that are not counted"
        )
    if checked:
        notes.append(
            "not checked: element types and opsets of ONNX Runtime's CUDA kernels (ops and "
            "attributes are), nor other providers for these GPUs"
        )
    return notes
