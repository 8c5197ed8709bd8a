"""Gemma-2 as a text encoder: hidden states of the decoder, no logits (arXiv 2408.00118)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError
from pid_jax.models.layers import Params, draw, linear, linear_spec
from pid_jax.models.rope import RopeTable, rotate, text_rope
from pid_jax.models.shell import Init, Shell

NORMS = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")


class Gemma2(Shell):
    """The network. Attributes carry the names of the published config.

    Attributes:
      attn_softcap: c of c * tanh(score / c) on attention scores; 0 for none. The released PiD was
        trained on embeddings without it (transformers 4.57 leaves it out), the Gemma paper has 50.
      full_attention: numbers of the layers that see everything; the others see `sliding_window`
        tokens back. None: every second layer, from layer 1 on.
      dtype: of the arithmetic.
    """

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: float = 256
    sliding_window: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    full_attention: tuple[int, ...] | None = None
    attn_softcap: float = 0.0
    dtype: Any = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(f"Gemma-2: {self.num_attention_heads} heads cannot share "
                            f"{self.num_key_value_heads} keys and values")

    def parameter_inits(self) -> dict[str, Init]:
        """`embedding` [V, D], `layers` (stacked on a leading axis) and `norm`."""
        return {
            "embedding": lambda key: 0.02 * jax.random.normal(
                key, (self.vocab_size, self.hidden_size)),
            "layers": lambda key: jax.lax.map(lambda key: draw(key, self._layer_spec()),
                                              jax.random.split(key, self.num_hidden_layers)),
            "norm": lambda key: {"scale": jnp.zeros((self.hidden_size,))}}

    def _layer_spec(self) -> dict:
        width, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        sizes = {"q": (width, queries), "k": (width, keys), "v": (width, keys),
                 "o": (queries, width), "gate": (width, inner), "up": (width, inner),
                 "down": (inner, width)}
        return {name: linear_spec(*size, bias=False) for name, size in sizes.items()} | {
            name: {"scale": jnp.zeros((width,))} for name in NORMS}

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """The hidden states after the final norm, [B, L, D] in `dtype`.

        Args:
          ids: int32 [B, L]; positions are 0, 1, 2, ... whatever the mask says.
          mask: bool [B, L], true at tokens, false at padding. Padded rows are computed like all
            others: they attend to the tokens.
        """
        return self.hidden_states(ids, mask)[-1]

    def hidden_states(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """[layers + 1, B, L, D]: the embeddings, the state after each layer; the last is normed."""
        x = self.weights["embedding"].astype(self.dtype)[ids]
        x = x * jnp.asarray(self.hidden_size**0.5, self.dtype)
        table, masks = text_rope(self.head_dim, ids.shape[1], self.rope_theta), self._masks(mask)

        def step(x: jax.Array, layer: tuple[Params, jax.Array]):
            params, is_full = layer
            out = self._layer(params, x, jnp.where(is_full, *masks), table)
            return out, out

        last, states = jax.lax.scan(step, x, (self.weights["layers"], self._full_layers()))
        normed = self._norm(self.weights["norm"], last)
        return jnp.concatenate([x[None], states[:-1], normed[None]])

    def _full_layers(self) -> np.ndarray:
        layers = np.arange(self.num_hidden_layers)
        if self.full_attention is None:
            return layers % 2 == 1
        return np.isin(layers, self.full_attention)

    def _masks(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which keys a query sees, bool [B, L, L], in full and in sliding layers."""
        position = np.arange(mask.shape[1])
        back = position[:, None] - position[None]
        full = mask[:, None].astype(bool) & (back >= 0)
        return full, full & (back < self.sliding_window)

    def _layer(self, params: Params, x: jax.Array, seen: jax.Array, table: RopeTable) -> jax.Array:
        h = self._attention(params, self._norm(params["input_norm"], x), seen, table)
        x = x + self._norm(params["post_attention_norm"], h)
        h = self._norm(params["pre_mlp_norm"], x)
        h = jax.nn.gelu(linear(params["gate"], h), approximate=True) * linear(params["up"], h)
        return x + self._norm(params["post_mlp_norm"], linear(params["down"], h))

    def _attention(self, params: Params, x: jax.Array, seen: jax.Array,
                   table: RopeTable) -> jax.Array:
        """Every key and value serves `heads / kv_heads` neighbouring query heads."""
        shared = self.num_attention_heads // self.num_key_value_heads
        q, k, v = (linear(params[name], x).reshape(*x.shape[:2], -1, self.head_dim)
                   for name in "qkv")
        q, k = rotate(q, table), rotate(k, table)
        q = q.reshape(*q.shape[:2], -1, shared, self.head_dim)
        scores = jnp.einsum("bqgsd,bkgd->bgsqk", q, k, preferred_element_type=jnp.float32)
        scores = scores * self.query_pre_attn_scalar**-0.5
        if self.attn_softcap:
            scores = jnp.tanh(scores / self.attn_softcap) * self.attn_softcap
        scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bgsqk,bkgd->bqgsd", weights, v)
        return linear(params["o"], out.reshape(*x.shape[:2], -1))

    def _norm(self, params: Params, x: jax.Array) -> jax.Array:
        """RMSNorm times (1 + scale), all in float32."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.rms_norm_eps)
        return (normed * (1 + params["scale"].astype(jnp.float32))).astype(x.dtype)
