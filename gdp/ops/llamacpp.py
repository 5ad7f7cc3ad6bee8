"""Numbers of llama.cpp that its files, its plans and its flags share."""

UBATCH = 512
"""Tokens of a prompt that it computes at once: the default of `--ubatch-size`."""
BATCH = 2048
"""Tokens that it takes together, the most of a micro-batch: the default of `--batch-size`."""
OFFLOAD_TOKENS = 32
"""Least tokens at once for which a GPU computes with weights that lie on the CPU, which are sent
for that (`--op-offload`, on by default): `offload_op` of ggml's backends."""
PROJECTOR, IMAGE_ENCODER = "mmproj", "ImageEncoder"
"""Name and type of the op of an image encoder, which has a separate file (`--mmproj`)."""
DRAFT = "draft"
"""Scope of the ops of a draft model, which has a separate file (`--draft`)."""
