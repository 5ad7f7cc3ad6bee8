"""Operators of the domain ai.onnx.ml: classical models, whose weights are attributes.

Rows of examples are [N, features]; one example of [features] counts as N = 1. Shape rules stand
where schemas of the onnx package have none in some version. Sources: the operators' texts in the
standard, and what ONNX Runtime makes of them.
"""

import math
from collections import Counter

from gdp.ops.onnx_view import (
    Inferred,
    NodeView,
    Partial,
    Tensor,
    data_type,
    need,
    tensor_list,
)
from gdp.ops.rule import NORMALISE_FLOP, Number, OpRule, rows

_ML = ("ai.onnx.ml",)


def _examples(view: NodeView) -> int:
    shape = need(view, 0).shape
    return shape[0] if len(shape) > 1 else 1


def _floats_like_first(view: NodeView) -> list[Inferred]:
    return [Tensor(data_type("FLOAT"), need(view, 0).shape)]


def _joined(view: NodeView) -> list[Inferred]:
    """Inputs of [N, features] side by side."""
    parts = [fact for fact in view.inputs if isinstance(fact, Tensor)]
    widths = view.attribute("inputdimensions") or [part.shape[-1] for part in parts]
    return [Tensor(data_type("FLOAT"), (_examples(view), sum(widths)))]


def _scores(view: NodeView) -> list[Inferred]:
    """[N, targets]: one score for each example and target."""
    targets = view.attribute("n_targets", 0) or view.attribute("targets", 1)
    return [Tensor(data_type("FLOAT"), (_examples(view), int(targets)))]


def _labels(view: NodeView) -> tuple[str, int]:
    """Element type of a classifier's labels, and how many there are; 0 where none are listed."""
    for key, dtype in (
        ("classlabels_strings", "STRING"), ("classlabels_ints", "INT64"),
        ("classlabels_int64s", "INT64"),
    ):  # fmt: skip
        if labels := view.attribute(key):
            return dtype, len(labels)
    return "INT64", 0


def _classified(view: NodeView) -> list[Inferred]:
    """The label of each example, and its scores for every class."""
    (dtype, classes), examples = _labels(view), _examples(view)
    scores = Tensor(data_type("FLOAT"), (examples, classes)) if classes else Partial()
    return [Tensor(data_type(dtype), (examples,)), scores]


def _zip_map(view: NodeView) -> list[Inferred]:
    """A map from labels to scores for each example: counted by its scores."""
    scores = need(view, 0)
    return [tensor_list([(Tensor(scores.dtype, scores.shape[-1:]), _examples(view))])]


def _linear(view: NodeView) -> Number:
    """A product with each coefficient."""
    return 2.0 * _examples(view) * len(view.attribute("coefficients") or ())


def _support_vectors(view: NodeView) -> Number:
    """A product with each number of the support vectors, and with each coefficient."""
    numbers = len(view.attribute("support_vectors") or ())
    return 2.0 * _examples(view) * (numbers + len(view.attribute("coefficients") or ()))


def _trees(view: NodeView) -> Number:
    """A comparison for each level of every tree, taken as balanced; a sum over trees."""
    if roots := view.attribute("tree_roots"):
        nodes = len(view.attribute("nodes_featureids") or ())
        sizes = [nodes / len(roots)] * len(roots)
    else:
        sizes = list(Counter(view.attribute("nodes_treeids") or ()).values())
    return _examples(view) * sum(math.log2(size + 1) + 1 for size in sizes)


ML: dict[str, OpRule] = {
    "Scaler": OpRule("", 2, None, _floats_like_first, _ML),
    "Normalizer": OpRule("", NORMALISE_FLOP, None, _floats_like_first, _ML),
    "Imputer": OpRule("", 1, None, lambda view: [need(view, 0)], _ML),
    "FeatureVectorizer": OpRule("", 0, None, _joined, _ML),
    "ZipMap": OpRule("", 0, None, _zip_map, _ML),
    **rows("Binarizer LabelEncoder CategoryMapper OneHotEncoder", "", 1),
    "ArrayFeatureExtractor": OpRule("", 0),
    "LinearRegressor": OpRule("", _linear, None, _scores, _ML),
    "LinearClassifier": OpRule("", _linear, None, _classified, _ML),
    "SVMRegressor": OpRule("", _support_vectors, None, _scores, _ML),
    "SVMClassifier": OpRule("", _support_vectors),
    "TreeEnsembleRegressor": OpRule("", _trees, None, _scores, _ML),
    "TreeEnsembleClassifier": OpRule("", _trees, None, _classified, _ML),
    "TreeEnsemble": OpRule("", _trees),
}
