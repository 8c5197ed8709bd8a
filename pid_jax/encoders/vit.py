"""Vision transformers: DINOv2 with registers and SigLIP-2 encode, a masked auto-encoder decodes.

Blocks are pre-norm, with biases everywhere (arXiv 2010.11929); DINOv2 scales what each of them adds
(arXiv 2304.07193) and carries register tokens (arXiv 2309.16588).
"""

import functools

import jax
import jax.numpy as jnp

from pid_jax.diffusion import resampling
from pid_jax.encoders.autoencoder import conv_spec
from pid_jax.models.attention import softmax_attention
from pid_jax.models.convolution import affine_init, conv, layer_norm
from pid_jax.models.layers import Params, Uniform, draw, linear, linear_spec
from pid_jax.models.shell import Init, Shell


class Vit(Shell):
    """Pictures to patch tokens. The defaults are DINOv2-B with registers.

    Attributes:
      grid: side, in patches, of the table of learned positions; resized for other pictures.
      class_token, registers: tokens that go before the patches and are dropped at the end;
        registers have no position.
      layer_scale: a factor per channel on what attention and feed-forward add.
      exact_gelu: the erf GELU; false: its tanh form.
    """

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp_size: int = 3072
    patch_size: int = 14
    grid: int = 37
    class_token: bool = True
    registers: int = 4
    layer_scale: bool = True
    exact_gelu: bool = True
    norm_eps: float = 1e-6

    def parameter_inits(self) -> dict[str, Init]:
        """`patch`, `position` and `blocks` (stacked); `cls` and `registers` where there are any."""
        width = self.hidden_size
        small = lambda *shape: lambda key: draw(key, Uniform(shape, 0.02))  # noqa: E731
        inits = {"patch": lambda key: draw(key, conv_spec(self.patch_size, 3, width)),
                 "position": small(self.grid**2 + self.class_token, width),
                 "blocks": functools.partial(
                     stacked_blocks, self.num_layers, width, self.mlp_size, self.layer_scale)}
        if self.class_token:
            inits["cls"] = small(width)
        if self.registers:
            inits["registers"] = small(self.registers, width)
        return inits

    def __call__(self, images: jax.Array) -> jax.Array:
        """Normalised pictures [B, H, W, 3] -> [B, H / patch, W / patch, D], no norm at the end."""
        patches = conv(self.weights["patch"], images, stride=self.patch_size)
        batch, rows, columns, width = patches.shape
        x = patches.reshape(batch, -1, width) + self._positions(rows, columns).astype(images.dtype)
        first = self._first_tokens().astype(images.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (batch, *first.shape)), x], axis=1)
        x = run_blocks(self.weights["blocks"], x, self.num_heads, self.norm_eps, self.exact_gelu)
        return x[:, len(first):].reshape(patches.shape)

    def _first_tokens(self) -> jax.Array:
        """[class token + registers, D]; only the class token has a position."""
        tokens = jnp.zeros((0, self.hidden_size))
        if self.class_token:
            tokens = (self.weights["cls"] + self.weights["position"][0])[None]
        return jnp.concatenate([tokens, self.weights["registers"]]) if self.registers else tokens

    def _positions(self, rows: int, columns: int) -> jax.Array:
        """[rows * columns, D], by bicubic interpolation where the table has another size."""
        table = self.weights["position"][int(self.class_token):]
        if (rows, columns) == (self.grid, self.grid):
            return table
        table = table.reshape(1, self.grid, self.grid, -1)
        return resampling.resize(table, rows, columns, resampling.bicubic_antialias_matrix
                                 ).reshape(rows * columns, -1)


class MaeDecoder(Shell):
    """Latent tokens to the pixels of patches (arXiv 2111.06377). The defaults are RAE's ViT-XL.

    Attributes:
      in_size: channels of a latent token.
      grid: side of the picture in patches; latents of another size are resized first.
    """

    in_size: int = 768
    hidden_size: int = 1152
    num_layers: int = 28
    num_heads: int = 16
    mlp_size: int = 4096
    patch_size: int = 16
    grid: int = 32
    norm_eps: float = 1e-12

    def parameter_inits(self) -> dict[str, Init]:
        """`embed`, `cls`, `position`, `blocks` (stacked), `norm`, `pred`."""
        width = self.hidden_size
        small = lambda *shape: lambda key: draw(key, Uniform(shape, 0.02))  # noqa: E731
        return {"embed": lambda key: draw(key, linear_spec(self.in_size, width)),
                "cls": small(width), "position": small(self.grid**2 + 1, width),
                "blocks": functools.partial(
                    stacked_blocks, self.num_layers, width, self.mlp_size, False),
                "norm": lambda key: affine_init(width),
                "pred": lambda key: draw(key, linear_spec(width, 3 * self.patch_size**2))}

    def __call__(self, latents: jax.Array) -> jax.Array:
        """[B, h, w, in] -> [B, grid * patch, grid * patch, 3], in the encoder's normalisation."""
        size, logits = self.grid, self.logits(latents)
        cells = logits.reshape(-1, size, size, self.patch_size, self.patch_size, 3)
        side = size * self.patch_size
        return cells.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side, side, 3)

    def logits(self, latents: jax.Array) -> jax.Array:
        """[B, grid^2, 3 patch^2]; numbers of a patch in the order row, column, colour."""
        if latents.shape[1:3] != (self.grid, self.grid):
            latents = resampling.resize(latents, self.grid, self.grid, resampling.bilinear_matrix
                                        ).astype(latents.dtype)
        weights = self.weights
        tokens = linear(weights["embed"], latents.reshape(len(latents), self.grid**2, -1))
        first = jnp.broadcast_to(weights["cls"].astype(tokens.dtype), tokens[:, :1].shape)
        x = jnp.concatenate([first, tokens], axis=1) + weights["position"].astype(tokens.dtype)
        x = run_blocks(weights["blocks"], x, self.num_heads, self.norm_eps, exact_gelu=True)
        return linear(weights["pred"], layer_norm(weights["norm"], x, self.norm_eps))[:, 1:]


# ---- blocks --------------------------------------------------------------------------------------

def stacked_blocks(count: int, width: int, mlp_size: int, layer_scale: bool,
                   key: jax.Array) -> Params:
    """Parameters of `count` blocks on a leading axis."""
    spec = {name: linear_spec(width, width) for name in ("q", "k", "v", "proj")}
    spec |= {"norm1": affine_init(width), "norm2": affine_init(width),
             "fc1": linear_spec(width, mlp_size), "fc2": linear_spec(mlp_size, width)}
    if layer_scale:
        spec |= {"scale1": jnp.ones((width,)), "scale2": jnp.ones((width,))}
    return jax.lax.map(lambda key: draw(key, spec), jax.random.split(key, count))


def run_blocks(params: Params, x: jax.Array, heads: int, eps: float,
               exact_gelu: bool) -> jax.Array:
    """All blocks on tokens [B, L, D]."""
    def step(x: jax.Array, block: Params) -> tuple[jax.Array, None]:
        out = _attention(block, layer_norm(block["norm1"], x, eps), heads)
        x = x + _scaled(block, "scale1", out)
        inner = linear(block["fc1"], layer_norm(block["norm2"], x, eps))
        out = linear(block["fc2"], jax.nn.gelu(inner, approximate=not exact_gelu))
        return x + _scaled(block, "scale2", out), None

    return jax.lax.scan(step, x, params)[0]


def _scaled(block: Params, name: str, x: jax.Array) -> jax.Array:
    return x * block[name].astype(x.dtype) if name in block else x


def _attention(block: Params, x: jax.Array, heads: int) -> jax.Array:
    split = (*x.shape[:2], heads, x.shape[-1] // heads)
    q, k, v = (linear(block[name], x).reshape(split) for name in "qkv")
    return linear(block["proj"], softmax_attention(q, k, v).reshape(x.shape))
