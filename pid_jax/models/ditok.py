"""DiTok: TiTok's frozen encoder and quantizer, and a JiT that draws a picture from their tokens.

The latent tokens of a picture take the place of JiT's class tokens: they are prepended to the
patches at block `in_context_start` (0: the content must reach every block), are not turned by the
rotary embedding and leave before the last layer. The label, if any, enters through the modulation.
Pictures are [B, H, W, 3] in [-1, 1]; the tokenizer's range [0, 1] is an inner matter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.attention import Attention, dense_attention
from pid_jax.models.jit import (JitDims, check_dims, check_drops, check_inputs, decoder_inits,
                                denoise, make_dropout)
from pid_jax.models.layers import linear, linear_init, normal
from pid_jax.models.outputs import NetOutput
from pid_jax.models.placement import Constrain, unconstrained
from pid_jax.models.shell import Init, Shell
from pid_jax.models.titok import (Quantized, check_tokenizer, codebook_rows, tokenize,
                                  tokenizer_inits)
from pid_jax.models.vit import VitDims, vit_dims


class DecoderDims(NamedTuple):
    """Width, blocks, heads and bottleneck of a diffusion decoder."""

    width: int
    depth: int
    heads: int
    bottleneck: int


DECODERS = {"base": DecoderDims(768, 12, 12, 128), "large": DecoderDims(1024, 24, 16, 128),
            "huge": DecoderDims(1280, 32, 16, 256)}
"""JiT-B, L and H."""


class DiTok(Shell):
    """DiTok; the defaults are TiTok-L32's tokenizer and a decoder of the size of JiT-L/16.

    `vit_enc_dims` (width, layers, heads) and `vit_dec_dims` (width, depth, heads, bottleneck)
    replace the named sizes. The gamma head exists with `gamma_head`.
    """

    codebook_size: int = 4096
    token_size: int = 12
    use_l2_norm: bool = True
    commitment_cost: float = 0.25
    vit_enc_model_size: str = "large"
    vit_enc_dims: tuple[int, ...] = ()
    vit_enc_patch_size: int = 16
    num_latent_tokens: int = 32
    crop_size: int = 256
    is_legacy: bool = True
    vit_dec_model_size: str = "large"
    vit_dec_dims: tuple[int, ...] = ()
    patch_size: int = 16
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    in_context_start: int = 0
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    gamma_head: bool = False
    dtype: Any = jnp.float32
    remat: str = "none"
    attention: Attention = dense_attention
    constrain: Constrain = unconstrained

    def __post_init__(self):
        super().__post_init__()
        check_tokenizer(self)
        check_dims(self.dims, self.remat)
        check_drops(self.attn_drop, self.proj_drop)

    @property
    def encoder_dims(self) -> VitDims:
        """Width, layers and heads of the encoder."""
        return vit_dims(self.vit_enc_model_size, self.vit_enc_dims)

    @property
    def dims(self) -> JitDims:
        """The diffusion decoder's."""
        size = decoder_dims(self.vit_dec_model_size, self.vit_dec_dims)
        return JitDims(self.crop_size, self.patch_size, size.width, size.depth, size.heads,
                       self.num_classes, size.bottleneck, self.in_context_start, self.mlp_ratio)

    @property
    def input_size(self) -> int:
        """Side of the pictures in pixels."""
        return self.crop_size

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key."""
        return tokenizer_inits(self) | {
            "diffusion_decoder": functools.partial(_draw_all, self._decoder_inits())}

    def _decoder_inits(self) -> dict[str, Init]:
        width = self.dims.hidden_size
        inits = decoder_inits(self.dims) | {
            "decoder_embed": functools.partial(linear_init, n_in=self.token_size, n_out=width),
            "latent_token_positional_embedding":
                lambda key: normal(width**-0.5)(key, (self.num_latent_tokens, width))}
        if self.gamma_head:
            inits["gamma_head"] = lambda key: {"kernel": jnp.zeros((width, 1)),
                                               "bias": jnp.zeros((1,))}
        return inits

    def __call__(self, x: jax.Array, t: jax.Array, y: jax.Array, z_q: jax.Array,
                 dropout_key: jax.Array | None = None) -> NetOutput:
        """Predicts the clean picture.

        Args:
          x: float32 [B, H, W, 3], noised pictures of side `crop_size`.
          t: float32 [B] in [0, 1]; 1 is clean.
          y: int [B], classes; `num_classes` stands for none.
          z_q: code vectors [B, K, token_size] of the pictures.
          dropout_key: for training; None drops nothing.
        """
        check_inputs(self.dims, x, t, y)
        self._check_codes(z_q)
        weights = self.weights["diffusion_decoder"]
        latents = linear(weights["decoder_embed"], z_q.astype(self.dtype))
        latents = latents + weights["latent_token_positional_embedding"].astype(self.dtype)
        out, _ = denoise(weights, x, t, y, latents, self.dims, dtype=self.dtype,
                         attention=self.attention, remat=self.remat,
                         dropout=make_dropout(self.proj_drop, dropout_key))
        return out

    def encode(self, pictures: jax.Array) -> Quantized:
        """Pictures [B, H, W, 3] in [-1, 1] -> tokens; no gradient passes."""
        return jax.lax.stop_gradient(tokenize(self, self.weights, (pictures + 1) / 2))

    def code_vectors(self, indices: jax.Array) -> jax.Array:
        """Indices int [B, K] -> code vectors [B, K, token_size]."""
        rows = codebook_rows(self.weights["quantize"]["embedding"], indices, self.use_l2_norm)
        return jax.lax.stop_gradient(rows)

    def _check_codes(self, z_q: jax.Array) -> None:
        if z_q.ndim != 3 or z_q.shape[1:] != (self.num_latent_tokens, self.token_size):
            raise UserError(f"code vectors have shape {z_q.shape}; expected [batch, "
                            f"{self.num_latent_tokens}, {self.token_size}]")


def decoder_dims(size: str, dims: tuple[int, ...] = ()) -> DecoderDims:
    """The dimensions of a named size, or `dims` where they are given."""
    if dims:
        if len(dims) != 4:
            raise UserError(f"vit_dec_dims is {dims}; expected (width, depth, heads, bottleneck)")
        return DecoderDims(*dims)
    if size not in DECODERS:
        raise UserError(f"vit_dec_model_size is {size!r}; choose one of {', '.join(DECODERS)}")
    return DECODERS[size]


def _draw_all(inits: dict[str, Init], key: jax.Array) -> dict:
    keys = jax.random.split(key, len(inits))
    return {name: init(part) for (name, init), part in zip(inits.items(), keys)}
