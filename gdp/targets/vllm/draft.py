"""A small model that drafts tokens (speculative decoding), where vLLM has it: beside the large one.

vLLM divides the small model as the large one (for the method `draft_model` both must have one
`tensor_parallel_size`), so that both are on all GPUs of a copy, and keep caches of a token there.
"""

from dataclasses import replace

import numpy as np

from gdp.base.errors import ArgumentError
from gdp.importers.spec import ModelSpec
from gdp.ops.vllm import AT_ONCE
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Placement, make_placement
from gdp.question.models import HF_PREFIX, Generation, Model, load, spec_of
from gdp.question.prepare import room_bytes
from gdp.question.question import Question


def beside(question: Question, placement: Placement) -> tuple[Question, Placement]:
    """The request of a plan to the small model of its question, on the GPUs of the large one.

    Args:
        question: Of a request (`--generate`), with a `draft`.
        placement: Of the large model.

    Raises:
        ArgumentError: There is no request, or the large model is in stages.
    """
    request, draft, cluster = question.graph.request, question.draft, question.cluster
    if request is None or draft is None:
        raise ArgumentError("a small model drafts for a request to a language model (--generate)")
    leads = np.unique(placement.device[question.graph.weight_bytes > 0])
    if len(leads) != 1:
        raise ArgumentError("vLLM drafts for no pipeline of stages")
    lead = int(leads[0])
    model = _as_the_large_one(
        Generation(
            draft.model, request.prompt, request.new, request.batch, request.requests or None,
            request.context or None,
        ),
        spec_of(question.model or ""),
    )  # fmt: skip
    graph = load(model, room_bytes=room_bytes(cluster, Constraints()))
    if graph.request is not None:
        graph = replace(graph, request=graph.request._replace(is_draft=True))
    teams = tuple(team for team in placement.teams if team[0] == lead)
    leading = {lead, *(d for team in teams for d in team)}
    small = make_placement(
        graph, cluster, np.where(graph.is_io, cluster.host, lead), made_by="gdp vllm, draft",
        teams=teams, splits=tuple(s for s in placement.splits if s.devices[0] in leading),
    )  # fmt: skip
    return replace(
        question, graph=graph, model=model, dims={}, constraints=Constraints(), draft=None
    ), small


def _as_the_large_one(draft: Generation, spec: str) -> Model:
    """The small model as the engine of the large one computes it: as many tokens in one pass, in
    its type (`SpeculativeConfig` of `vllm/config/speculative.py`)."""
    if not spec.startswith(HF_PREFIX):
        return draft
    from gdp.importers.huggingface.dtype import loaded_config

    large = loaded_config(spec)
    served = ModelSpec.of(draft).by_default(**{AT_ONCE: large.spec.max_num_batched_tokens})
    return served.having(dtype=large.loaded)
