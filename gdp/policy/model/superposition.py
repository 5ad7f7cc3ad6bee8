"""Parameter superposition: dense layers modulated by a gate that the whole graph decides.

GDP (arXiv 1910.01578, equation 5): x' = g(c(x0) * x), with g a dense layer of the placer and c a
conditioning layer fed by the graph's representation x0; after Cheung et al. 2019, arXiv 1902.05522.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Gate(nnx.Module):
    """c: a positive factor per input feature, 2 sigmoid(W x0 + b); one everywhere at the start."""

    def __init__(self, whole: int, features: int, *, rngs: nnx.Rngs) -> None:
        self.conditioning = nnx.Linear(
            whole,
            features,
            kernel_init=nnx.initializers.zeros_init(),
            bias_init=nnx.initializers.zeros_init(),
            rngs=rngs,
        )

    def __call__(self, whole: Float[Array, "C"]) -> Float[Array, "F"]:
        return 2.0 * jax.nn.sigmoid(self.conditioning(whole))


class SuperposedLinear(nnx.Module):
    """A dense layer behind its gate; without a gate, an ordinary dense layer."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        whole: int,
        *,
        gated: bool,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.dense = nnx.Linear(inputs, outputs, use_bias=use_bias, rngs=rngs)
        self.gate = Gate(whole, inputs, rngs=rngs) if gated else None

    def factor(self, whole: Float[Array, "C"]) -> Float[Array, "F"]:
        """The gate's value, ones without a gate."""
        if self.gate is None:
            return jnp.ones(self.dense.in_features)
        return self.gate(whole)

    def kernel(self, whole: Float[Array, "C"]) -> Float[Array, "F O"]:
        """The weights with the gate folded in: (c * x) W = x (c W)."""
        return self.factor(whole)[:, None] * self.dense.kernel[...]

    def offset(self) -> Float[Array, "O"]:
        """The bias, zeros without one."""
        bias = self.dense.bias
        return jnp.zeros(self.dense.out_features) if bias is None else jnp.asarray(bias[...])

    def __call__(self, x: Float[Array, "... F"], whole: Float[Array, "C"]) -> Float[Array, "... O"]:
        return self.dense(x * self.factor(whole))
