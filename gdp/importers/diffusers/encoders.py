"""Text encoders of pipelines: classes of transformers, and one call of each."""

from typing import Any

ENCODERS = {
    "BertModel": "BertConfig", "CLIPTextModel": "CLIPTextConfig",
    "CLIPTextModelWithProjection": "CLIPTextConfig", "Gemma2Model": "Gemma2Config",
    "LlamaModel": "LlamaConfig", "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "T5EncoderModel": "T5Config", "UMT5EncoderModel": "UMT5Config",
}  # fmt: skip
"""Every class of text encoders, with that of its configuration."""
_CACHED = ("Gemma2Model", "LlamaModel", "Qwen2_5_VLForConditionalGeneration")
"""Decoders, whose last states are read; pipelines keep no cache of them."""


def encoder_call(model: Any, batch: int, tokens: int) -> tuple[Any, dict[str, Any]]:
    """(module, inputs) of one call on torch's default device."""
    import torch

    of_decoder = type(model).__name__ in _CACHED
    more = {"use_cache": False, "output_hidden_states": True} if of_decoder else {}

    class Encode(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any) -> Any:
            result = self.model(input_ids=input_ids, **more)
            if of_decoder:
                return result.hidden_states[-1]
            # Pipelines read the states of a CLIP model and its pooled or projected vector.
            pooled = getattr(result, "text_embeds", getattr(result, "pooler_output", None))
            return (
                result.last_hidden_state if pooled is None else (result.last_hidden_state, pooled)
            )

    return Encode().eval(), {"input_ids": torch.zeros(batch, tokens, dtype=torch.long)}
