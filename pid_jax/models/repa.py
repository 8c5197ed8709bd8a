"""The projector of representation alignment (REPA, arXiv 2410.06940): hidden tokens to features."""

import functools

import jax
import jax.numpy as jnp

from pid_jax.models.layers import Params, draw, linear, linear_spec
from pid_jax.models.shell import Init

NAME = "repa_projector"


def parameter_inits(hidden: int, width: int, features: int) -> dict[str, Init]:
    """The projector of tokens [.., hidden] to [.., features]; nothing when `features` is 0."""
    if not features:
        return {}
    return {NAME: functools.partial(draw, specs={
        "fc1": linear_spec(hidden, width), "fc2": linear_spec(width, width),
        "fc3": linear_spec(width, features)})}


def project(params: Params, tokens: jax.Array) -> jax.Array:
    """Three linear layers with SiLU between, float32: [B, L, hidden] -> [B, L, features]."""
    tokens = jax.nn.silu(linear(params["fc1"], tokens.astype(jnp.float32)))
    return linear(params["fc3"], jax.nn.silu(linear(params["fc2"], tokens)))
