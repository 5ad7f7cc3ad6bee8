"""FLOPs of the attention operators, of the standard and of ONNX Runtime."""

from gdp.importers import op_costs
from gdp.importers.onnx.shapes.types import NodeView, Tensor
from gdp.importers.op_costs import Number


def _standard(view: NodeView) -> Number:
    """Attention of the standard: [B, heads, S, size], or [B, S, heads * size] with head counts."""
    q, k, v = view.shape(0), view.shape(1), view.shape(2)
    past = view.shape(4)[2] if view.has(4) else 0
    if len(q) == 4:
        batch, heads, queries, size = q
        keys, value_size = k[2] + past, v[-1]
    else:
        heads, kv_heads = int(view.attribute("q_num_heads")), int(view.attribute("kv_num_heads"))
        batch, queries, size = q[0], q[1], q[2] // heads
        keys, value_size = k[1] + past, v[2] // kv_heads
    flop = op_costs.attention_flop(batch, heads, queries, keys, size, value_size)
    return flop + batch * heads * queries * keys * view.has(3)


def linear_attention(view: NodeView) -> Number:
    """Per step, a state of [key size, value size] per key-value head takes in k v (two operations
    per entry), is decayed (one) and corrected (two) where the rule says so; each query head reads
    its state (two)."""
    heads, kv_heads = int(view.attribute("q_num_heads")), int(view.attribute("kv_num_heads"))
    batch, steps, width = view.shape(0)
    entries = batch * steps * (width // heads) * (view.shape(2)[-1] // kv_heads)
    rule = str(view.attribute("update_rule", "gated_delta"))
    update = 2.0 + ("gated" in rule) + 2.0 * ("delta" in rule)
    return entries * (kv_heads * update + 2.0 * heads)


def fused_attention(view: NodeView) -> Number:
    """com.microsoft Attention and QAttention: the input projection, then attention."""
    batch, steps, inner = view.shape(0)
    weights, heads = view.shape(1), int(view.attribute("num_heads", 1))
    width = view.out_shape[-1]
    past = view.shape(4)[3] if len(view.shape(4)) == 5 else 0
    key_size = (weights[-1] - width) // 2 // heads
    flop = op_costs.matmul_flop(1, batch * steps, weights[-1], inner)
    flop += batch * steps * weights[-1]
    return flop + op_costs.attention_flop(
        batch, heads, steps, steps + past, key_size, width // heads
    )


def multi_head_attention(view: NodeView) -> Number:
    """Keys are counted from `present` where it is made, else from the key itself."""
    batch, queries, width = view.out_shape
    heads, key = int(view.attribute("num_heads", 1)), view.shape(1)
    present = view.outputs[1] if len(view.outputs) > 1 else None
    if isinstance(present, Tensor):
        keys = present.shape[2]
    else:
        keys = (key[2] if len(key) == 4 else key[1]) if key else queries
    size = width // heads
    return op_costs.attention_flop(batch, heads, queries, keys, size, size)


def attention(view: NodeView) -> Number:
    """FLOPs of an attention node, of ONNX's domain or of com.microsoft."""
    return fused_attention(view) if view.domain == "com.microsoft" else _standard(view)
