"""Sigma-aware gates: how much of the low-quality signal enters a token stream (PiD, 2605.23902)."""

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.layers import Params, normal, product

GATE_TYPES = ("sigma_aware_per_token", "sigma_aware_per_token_per_dim")


def gate_width(gate_type: str, dim: int) -> int:
    """Gate values per token: 1, or one per channel. Raises UserError for an unknown type."""
    if gate_type not in GATE_TYPES:
        raise UserError(f"lq_gate_type is {gate_type!r}; choose one of {', '.join(GATE_TYPES)}")
    return 1 if gate_type == "sigma_aware_per_token" else dim


def gate_init(key: jax.Array, dim: int, gate_type: str) -> dict:
    """Parameters of one gate: mostly open (bias 2) on clean input, closing as sigma grows.

    Returns: `{log_alpha [], content_proj: {kernel [2 * dim, width], bias [width]}}`, the kernel's
    first `dim` rows for the stream and the rest for the low-quality feature.
    """
    width = gate_width(gate_type, dim)
    return {"log_alpha": jnp.log(5.0),
            "content_proj": {"kernel": normal(0.01)(key, (2 * dim, width)),
                             "bias": jnp.full((width,), 2.0)}}


def sigma_aware_gate(gate: Params, x: jax.Array, lq: jax.Array, sigma: jax.Array) -> jax.Array:
    """`x + sigmoid(Linear([x, lq]) - exp(log_alpha) * sigma) * lq`.

    Args:
      gate: parameters of `gate_init`.
      x, lq: stream and low-quality feature `[B, L, D]`, of one dtype, which the result keeps.
      sigma: noise level of the low-quality latent, float32 `[B]`, 0 for a clean one.
    Returns: `[B, L, D]`. The gate itself is computed in float32 after the projection.
    """
    kernel = gate["content_proj"]["kernel"].astype(x.dtype)
    dim = x.shape[-1]
    # Two products spare the concatenation of the two streams.
    content = (product(x, kernel[:dim]) + product(lq, kernel[dim:])).astype(jnp.float32)
    content = content + gate["content_proj"]["bias"].astype(jnp.float32)
    closing = jnp.exp(gate["log_alpha"].astype(jnp.float32)) * sigma.astype(jnp.float32)
    opening = jax.nn.sigmoid(content - closing[:, None, None])
    return x + opening.astype(x.dtype) * lq
