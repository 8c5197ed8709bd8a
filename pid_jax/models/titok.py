"""TiTok: a picture as a few tokens out of a codebook (arXiv 2406.07550).

Pictures are [B, H, W, 3] in [0, 1] (not [-1, 1]), tokens [B, K, token_size]. The released networks
are L32, B64 and S128; all three are `is_legacy`: their encoder folds [B, K, W] to [B, W, K] by a
reshape without a transpose, and their decoder predicts codes of a MaskGIT-VQGAN.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pid_jax.errors import UserError
from pid_jax.models.attention import Attention, dense_attention
from pid_jax.models.convolution import affine_init, conv, conv_init, layer_norm
from pid_jax.models.layers import Params, linear, linear_init, normal, to_grid, unpatchify
from pid_jax.models.maskgit_vqgan import (PixelCodecDims, decode_pixels, decoder_init,
                                          squared_distances)
from pid_jax.models.placement import Constrain, unconstrained
from pid_jax.models.shell import Init, Shell
from pid_jax.models.vit import VitDims, blocks_init, run_vit, vit_dims

PRESETS = {
    "l32": {"vit_enc_model_size": "large", "vit_dec_model_size": "large", "num_latent_tokens": 32},
    "b64": {"vit_enc_model_size": "base", "vit_dec_model_size": "base", "num_latent_tokens": 64},
    "s128": {"vit_enc_model_size": "small", "vit_dec_model_size": "small",
             "num_latent_tokens": 128}}
"""Options of the released networks; what they do not name has the defaults of `TiTok`."""
PIXEL_CODES = 1024  # of the MaskGIT-VQGAN; the legacy decoder is made for it
NORM_EPS = 1e-12


class Quantized(NamedTuple):
    """What the quantizer makes of vectors [B, K, C]."""

    vectors: jax.Array
    """[B, K, C] float32: rows of the codebook; their gradient goes to the input unchanged."""
    indices: jax.Array
    """[B, K] int32."""
    commitment_loss: jax.Array
    codebook_loss: jax.Array

    @property
    def loss(self) -> jax.Array:
        """Both losses."""
        return self.commitment_loss + self.codebook_loss


# ---- encoder ------------------------------------------------------------------------------------

def encoder_init(key: jax.Array, dims: VitDims, patch: int, grid: int, tokens: int,
                 token_size: int) -> dict:
    """Parameters of `encode`."""
    keys, width = jax.random.split(key, 4), dims.width
    return {"patch_embed": conv_init(keys[0], patch, 3, width),
            **_positions(keys[1], width, grid, tokens),
            "ln_pre": affine_init(width), "transformer": blocks_init(dims)(keys[2]),
            "ln_post": affine_init(width), "conv_out": linear_init(keys[3], width, token_size)}


def _positions(key: jax.Array, width: int, grid: int, tokens: int) -> dict:
    keys, draw = jax.random.split(key, 3), normal(width**-0.5)
    return {"class_embedding": draw(keys[0], (1, width)),
            # As large as what stands at the places, so that brightness survives the layer norm.
            "positional_embedding": normal(0.5)(keys[1], (grid**2 + 1, width)),
            "latent_token_positional_embedding": draw(keys[2], (tokens, width))}


def encode(params: Params, latent_tokens: jax.Array, pictures: jax.Array, heads: int, *,
           is_legacy: bool, attention: Attention = dense_attention, remat: str = "none",
           collect: bool = False) -> tuple[jax.Array, dict[str, jax.Array | None]]:
    """Pictures [B, H, W, 3] in [0, 1] -> vectors [B, K, token_size] and intermediate tokens."""
    patch = params["patch_embed"]["kernel"].shape[0]
    patches = conv(params["patch_embed"], pictures, stride=patch)
    x = _with_class(params, patches.reshape(len(pictures), -1, patches.shape[-1]))
    latents = latent_tokens + params["latent_token_positional_embedding"]
    x = jnp.concatenate([x, _for_each(latents, x)], axis=1)
    start = layer_norm(params["ln_pre"], x)
    x, blocks = run_vit(params["transformer"], start, heads, attention, remat, collect)
    latents = layer_norm(params["ln_post"], x[:, -len(latent_tokens):])
    shown = {"ln_pre": start, "blocks": blocks, "ln_post": latents}
    if is_legacy:
        batch, count, width = latents.shape
        latents = latents.reshape(batch, width, count).swapaxes(1, 2)
    return linear(params["conv_out"], latents), shown


def _with_class(params: Params, patches: jax.Array) -> jax.Array:
    """[class, patches] with their positions."""
    x = jnp.concatenate([_for_each(params["class_embedding"], patches), patches], axis=1)
    return x + params["positional_embedding"].astype(x.dtype)


def _for_each(table: jax.Array, like: jax.Array) -> jax.Array:
    """A table [n, W] for every sample of `like` [B, ...]."""
    return jnp.broadcast_to(table.astype(like.dtype), (len(like), *table.shape))


# ---- quantizer ----------------------------------------------------------------------------------

def unit_length(x: jax.Array) -> jax.Array:
    """x / max(|x|, 1e-12) along the last axis, in float32."""
    x = x.astype(jnp.float32)
    square = jnp.sum(x * x, -1, keepdims=True)
    length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    return x / jnp.where(square > 0, jnp.maximum(length, NORM_EPS), NORM_EPS)


def codebook_rows(codebook: jax.Array, indices: jax.Array, use_l2_norm: bool) -> jax.Array:
    """Code vectors [..., C] float32 of indices [...]; of unit length under `use_l2_norm`."""
    rows = codebook.astype(jnp.float32)[indices]
    return unit_length(rows) if use_l2_norm else rows


def quantize(codebook: jax.Array, z: jax.Array, use_l2_norm: bool,
             commitment_cost: float = 0.25) -> Quantized:
    """The nearest code of every vector z [..., C], in float32, straight through.

    Args:
      codebook: [N, C].
      use_l2_norm: vectors and codes are compared, and handed on, at unit length.
    """
    prepare = unit_length if use_l2_norm else lambda x: x.astype(jnp.float32)
    z, codes = prepare(z), prepare(codebook)
    indices = jnp.argmin(squared_distances(z, codes), axis=-1).astype(jnp.int32)
    rows, stop = codes[indices], jax.lax.stop_gradient
    return Quantized(z + stop(rows - z), indices,
                     commitment_cost * jnp.mean((stop(rows) - z) ** 2),
                     jnp.mean((rows - stop(z)) ** 2))


# ---- decoder ------------------------------------------------------------------------------------

def vit_decoder_init(key: jax.Array, dims: VitDims, patch: int, grid: int, tokens: int,
                     token_size: int, is_legacy: bool) -> dict:
    """Parameters of `decode_tokens`."""
    keys, width = jax.random.split(key, 5), dims.width
    return {"decoder_embed": linear_init(keys[0], token_size, width),
            "mask_token": normal(width**-0.5)(keys[1], (1, width)),
            **_positions(keys[2], width, grid, tokens),
            "ln_pre": affine_init(width), "transformer": blocks_init(dims)(keys[3]),
            "ln_post": affine_init(width), **_head_init(keys[4], width, patch, is_legacy)}


def _head_init(key: jax.Array, width: int, patch: int, is_legacy: bool) -> dict:
    keys = jax.random.split(key)
    if is_legacy:
        return {"ffn": {"fc1": linear_init(keys[0], width, 2 * width),
                        "fc2": linear_init(keys[1], 2 * width, PIXEL_CODES)}}
    return {"ffn": {"fc1": linear_init(keys[0], width, 3 * patch * patch)},
            "conv_out": conv_init(keys[1], 3, 3, 3)}


def decode_tokens(params: Params, z_q: jax.Array, heads: int, *,
                  attention: Attention = dense_attention, remat: str = "none") -> jax.Array:
    """Code vectors [B, K, token_size] -> the decoder's grid.

    Returns logits [B, h, w, 1024] over pixel codes (legacy), or pictures [B, H, W, 3] in [0, 1].
    """
    latents = linear(params["decoder_embed"], z_q)
    latents = latents + params["latent_token_positional_embedding"].astype(latents.dtype)
    cells = len(params["positional_embedding"]) - 1
    masks = jnp.broadcast_to(params["mask_token"].astype(latents.dtype),
                             (len(z_q), cells, latents.shape[-1]))
    x = jnp.concatenate([_with_class(params, masks), latents], axis=1)
    x, _ = run_vit(params["transformer"], layer_norm(params["ln_pre"], x), heads, attention, remat)
    return _head(params, layer_norm(params["ln_post"], x[:, 1:1 + cells]))


def _head(params: Params, x: jax.Array) -> jax.Array:
    side = round(x.shape[1] ** 0.5)
    hidden = linear(params["ffn"]["fc1"], x)
    if "fc2" in params["ffn"]:
        return to_grid(linear(params["ffn"]["fc2"], jnp.tanh(hidden)), (side, side))
    patch = round((hidden.shape[-1] / 3) ** 0.5)
    pixels = hidden.reshape(*x.shape[:2], patch**2, 3).swapaxes(-1, -2)
    return conv(params["conv_out"], unpatchify(pixels, (side, side), patch), padding=1)


# ---- the network --------------------------------------------------------------------------------

class TiTok(Shell):
    """TiTok with the option names of its PyTorch code; the defaults are L32's.

    `vit_enc_dims` and `vit_dec_dims` (width, layers, heads) replace the named sizes. With
    `finetune_decoder` (stage 2 of TiTok's training) a legacy network has a MaskGIT-VQGAN decoder,
    which `pixel_*` describe, and the quantizer's losses count nothing. Without `with_decoder`
    there is only what makes tokens.
    """

    codebook_size: int = 4096
    token_size: int = 12
    use_l2_norm: bool = True
    commitment_cost: float = 0.25
    vit_enc_model_size: str = "large"
    vit_dec_model_size: str = "large"
    vit_enc_dims: tuple[int, ...] = ()
    vit_dec_dims: tuple[int, ...] = ()
    vit_enc_patch_size: int = 16
    vit_dec_patch_size: int = 16
    num_latent_tokens: int = 32
    crop_size: int = 256
    is_legacy: bool = True
    finetune_decoder: bool = True
    with_decoder: bool = True
    pixel_hidden_channels: int = 128
    pixel_channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    pixel_num_res_blocks: int = 2
    pixel_z_channels: int = 256
    dtype: Any = jnp.float32
    remat: str = "none"
    attention: Attention = dense_attention
    constrain: Constrain = unconstrained

    def __post_init__(self):
        super().__post_init__()
        check_tokenizer(self)
        check_grid(self.crop_size, self.vit_dec_patch_size, "vit_dec_patch_size")
        _ = self.decoder_dims

    @property
    def encoder_dims(self) -> VitDims:
        """Width, layers and heads of the encoder."""
        return vit_dims(self.vit_enc_model_size, self.vit_enc_dims)

    @property
    def decoder_dims(self) -> VitDims:
        """Width, layers and heads of the decoder."""
        return vit_dims(self.vit_dec_model_size, self.vit_dec_dims)

    @property
    def pixel_dims(self) -> PixelCodecDims:
        """The pixel decoder's."""
        return PixelCodecDims(self.pixel_hidden_channels, tuple(self.pixel_channel_mult),
                              self.pixel_num_res_blocks, self.pixel_z_channels)

    def parameter_inits(self) -> dict[str, Init]:
        """The parameter tree: top-level name -> initialiser of a PRNG key."""
        if not self.with_decoder:
            return tokenizer_inits(self)
        grid = self.crop_size // self.vit_dec_patch_size
        inits = tokenizer_inits(self) | {"decoder": functools.partial(
            vit_decoder_init, dims=self.decoder_dims, patch=self.vit_dec_patch_size, grid=grid,
            tokens=self.num_latent_tokens, token_size=self.token_size, is_legacy=self.is_legacy)}
        if not (self.is_legacy and self.finetune_decoder):
            return inits
        return inits | {
            "pixel_quantize": lambda key: {"embedding": normal(1.0)(
                key, (PIXEL_CODES, self.pixel_z_channels))},
            "pixel_decoder": functools.partial(decoder_init, dims=self.pixel_dims)}

    def __call__(self, pictures: jax.Array) -> tuple[jax.Array, Quantized]:
        """Pictures [B, H, W, 3] in [0, 1] -> their reconstruction, and what the quantizer made."""
        quantized = self.encode(pictures)
        return self.decode(quantized.vectors), quantized

    def encode(self, pictures: jax.Array) -> Quantized:
        """Pictures [B, H, W, 3] in [0, 1] -> tokens; the losses are 0 under `finetune_decoder`."""
        found = tokenize(self, self.weights, pictures)
        if not self.finetune_decoder:
            return found
        return found._replace(commitment_loss=0 * found.commitment_loss,
                              codebook_loss=0 * found.codebook_loss)

    def encode_vectors(self, pictures: jax.Array) -> jax.Array:
        """Vectors [B, K, token_size] before the quantizer."""
        return encode_vectors(self, self.weights, pictures)

    def decode_indices(self, indices: jax.Array) -> jax.Array:
        """Indices int [B, K] -> pictures [B, H, W, 3] in [0, 1], not clamped."""
        return self.decode(codebook_rows(self.weights["quantize"]["embedding"], indices,
                                         self.use_l2_norm))

    def decode_grid(self, z_q: jax.Array) -> jax.Array:
        """Code vectors [B, K, token_size] -> what `decode_tokens` gives."""
        if not self.with_decoder:
            raise UserError("this TiTok only makes tokens (with_decoder False); convert weights "
                            "that hold decoder.* to draw with it")
        return decode_tokens(self.weights["decoder"], z_q.astype(self.dtype),
                             self.decoder_dims.heads, attention=self.attention, remat=self.remat)

    def decode(self, z_q: jax.Array) -> jax.Array:
        """Code vectors [B, K, token_size] -> pictures [B, H, W, 3] in [0, 1], not clamped."""
        grid = self.decode_grid(z_q)
        if not self.is_legacy:
            return grid.astype(jnp.float32)
        if not self.finetune_decoder:
            raise UserError("this TiTok is of stage 1 (finetune_decoder False) and has no pixel "
                            "decoder; convert weights that hold pixel_decoder.* to draw with it")
        codes = jax.nn.softmax(grid.astype(jnp.float32), axis=-1).astype(self.dtype)
        hidden = codes @ self.weights["pixel_quantize"]["embedding"].astype(self.dtype)
        pictures = decode_pixels(self.weights["pixel_decoder"], hidden, self.pixel_dims)
        return pictures.astype(jnp.float32)


def tokenizer_inits(net: Any) -> dict[str, Init]:
    """Parameters of encoder, latent tokens and quantizer of TiTok (or DiTok)."""
    dims, tokens = net.encoder_dims, net.num_latent_tokens
    return {
        "encoder": functools.partial(
            encoder_init, dims=dims, patch=net.vit_enc_patch_size,
            grid=net.crop_size // net.vit_enc_patch_size, tokens=tokens,
            token_size=net.token_size),
        "latent_tokens": lambda key: normal(dims.width**-0.5)(key, (tokens, dims.width)),
        "quantize": lambda key: {"embedding": jax.random.uniform(
            key, (net.codebook_size, net.token_size), minval=-1 / net.codebook_size,
            maxval=1 / net.codebook_size)}}


def encode_vectors(net: Any, weights: Params, pictures: jax.Array) -> jax.Array:
    """Pictures [B, H, W, 3] in [0, 1] -> vectors [B, K, token_size] float32."""
    check_pictures(pictures, net.crop_size)
    z, _ = encode(weights["encoder"], weights["latent_tokens"], pictures.astype(net.dtype),
                  net.encoder_dims.heads, is_legacy=net.is_legacy, attention=net.attention,
                  remat=net.remat)
    return z.astype(jnp.float32)


def tokenize(net: Any, weights: Params, pictures: jax.Array) -> Quantized:
    """`encode_vectors`, quantized."""
    return quantize(weights["quantize"]["embedding"], encode_vectors(net, weights, pictures),
                    net.use_l2_norm, net.commitment_cost)


def check_pictures(pictures: jax.Array, side: int) -> None:
    """Raises UserError unless pictures are [B, side, side, 3]."""
    if pictures.ndim != 4 or pictures.shape[1:] != (side, side, 3):
        raise UserError(f"pictures have shape {pictures.shape}; this network takes [batch, {side}, "
                        f"{side}, 3]: crop or resize them")


def check_tokenizer(net: Any) -> None:
    """Raises UserError for options of the tokenizer that no network can have."""
    for name in ("codebook_size", "token_size", "num_latent_tokens", "vit_enc_patch_size"):
        if getattr(net, name) < 1:
            raise UserError(f"{name} is {getattr(net, name)}; it must be at least 1")
    check_grid(net.crop_size, net.vit_enc_patch_size, "vit_enc_patch_size")
    _ = net.encoder_dims


def check_grid(side: int, patch: int, what: str) -> None:
    """Raises UserError unless patches tile the picture."""
    if patch < 1 or side < patch or side % patch:
        raise UserError(f"{what} is {patch}, which does not divide the picture's side {side}; "
                        "choose one that does")
