"""What a layer adds after its attention: a gated MLP, or a mixture of such, its experts.

    mlp(x) = down(activation(gate(x)) * up(x))            mixture(x) = sum_e weight[e] * mlp_e(x)

Experts are scanned, and one that no token chose is skipped, its weights unread. One that is computed is computed
for all tokens of the call and counts 0 for those that did not choose it: there are E / X times as many operations
in a long prompt as are needed, and none too many in a step of one token.

Shape letters: M tokens, D hidden, E experts, X chosen ones, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import Leaf, Linear
from llmq.model.config import Experts, ModelConfig

#: `ModelConfig.activation` -> what it is.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype),
}


@register_dataclass
@dataclass(frozen=True)
class Mlp:
    """The MLP of a layer, or of one expert; the arrays of all experts along an axis in front."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, config: ModelConfig, x_MD: jax.Array, used_M: jax.Array) -> jax.Array:  # noqa: ARG002
        """Compute it.

        Args:
            config: The model.
            x_MD: In the compute type.
            used_M: bool, the tokens that are no padding; all are computed.

        Returns:
            `[M, D]` in the compute type.
        """
        return self.down(ACTIVATIONS[config.activation](self.gate(x_MD)) * self.up(x_MD))


@register_dataclass
@dataclass(frozen=True)
class Mixture:
    """The experts of a layer; in a segment, of all its layers, and `layer` says which.

    Attributes:
        router_ED: In the type it is stored in.
        experts: Arrays with an axis of experts in front; in a segment, behind that of layers.
        layer: Index; None where the arrays are those of one layer.
    """

    router_ED: Leaf
    experts: Mlp
    layer: Leaf | None = None

    def __call__(self, config: ModelConfig, x_MD: jax.Array, used_M: jax.Array) -> jax.Array:
        """Compute the experts that a token chose; see `Mlp.__call__`. The sum is one of float32."""
        assert config.experts is not None
        weight_ME = jnp.where(used_M[:, None], route(x_MD, self.router_ED[self.layer], config.experts), 0)

        def add_expert(y_MD: jax.Array, scanned: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            index, weight_M = scanned

            def compute(y_MD: jax.Array) -> jax.Array:
                expert: Mlp = jax.tree.map(partial(_at, self.layer, index), self.experts)
                added_MD = expert(config, x_MD, used_M).astype(jnp.float32)
                return y_MD + jnp.where(weight_M[:, None] > 0, weight_M[:, None] * added_MD, 0)

            return lax.cond(jnp.any(weight_M > 0), compute, lambda y_MD: y_MD, y_MD), None

        scanned = (jnp.arange(config.experts.num_experts), weight_ME.T)
        y_MD, _ = lax.scan(add_expert, jnp.zeros(x_MD.shape, jnp.float32), scanned)
        return y_MD.astype(x_MD.dtype)


def _at(layer: Leaf, expert: jax.Array, stack: jax.Array) -> jax.Array:
    """One matrix of a stack `[L, E, ...]`, cut out at once: of a layer's experts there would be a copy."""
    zeros = (0,) * (stack.ndim - 2)
    return lax.dynamic_slice(stack, (layer, expert, *zeros), (1, 1, *stack.shape[2:]))[0, 0]


def route(x_MD: jax.Array, router_ED: jax.Array, experts: Experts) -> jax.Array:
    """How much each expert counts for each token.

    Args:
        x_MD: In the compute type.
        router_ED: In any type.
        experts: How many are chosen.

    Returns:
        float32 `[M, E]`, 0 for experts that are not chosen.
    """
    prob_MX, chosen_MX = lax.top_k(probabilities(x_MD, router_ED), experts.num_chosen)
    if experts.normalized:
        prob_MX = prob_MX / jnp.sum(prob_MX, axis=-1, keepdims=True)
    return jnp.sum(jax.nn.one_hot(chosen_MX, experts.num_experts) * prob_MX[..., None], axis=1)


def probabilities(x_MD: jax.Array, router_ED: jax.Array) -> jax.Array:
    """How likely each expert is for each token.

    Args:
        x_MD: In the compute type.
        router_ED: In any type.

    Returns:
        float32 `[M, E]`.
    """
    wide = (x_MD.astype(jnp.float32), router_ED.astype(jnp.float32))
    return jax.nn.softmax(jnp.einsum("md,ed->me", *wide, precision=lax.Precision.HIGHEST), axis=-1)
