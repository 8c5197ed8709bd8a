"""PidNet: PixelDiT that also sees a low-quality (LQ) latent or image (PiD, arXiv 2605.23902).

The LQ branch makes one feature per injection point; before every `lq_interval`-th patch block a
sigma-aware gate adds it to the image tokens, and optionally one more to the condition of the pixel
blocks. Without any LQ input the network is its backbone.
"""

import functools
from collections.abc import Callable

import jax

from pid_jax.errors import UserError
from pid_jax.models.gates import gate_init, sigma_aware_gate
from pid_jax.models.layers import Params
from pid_jax.models.lq_checks import check_batches, check_per_sample
from pid_jax.models.lq_projection import LqProjection, read_head
from pid_jax.models.outputs import NetOutput
from pid_jax.models.pixeldit import PixelDiT, check_inputs
from pid_jax.models.shell import Init
from pid_jax.models.stacking import Injection
from pid_jax.models.tiling import updated_by_tiles


class PidNet(PixelDiT):
    """PixelDiT with LQ injection. Option names and defaults are those of the PyTorch reference.

    `lq_*`, `sr_scale` and `latent_spatial_down_factor` are explained at `LqProjection`;
    `lq_interval`: patch blocks from one injection to the next; `pit_lq_inject`: also inject into
    the condition of the pixel blocks; `train_lq_proj_only`: said for the optimizer, which then
    trains `lq_proj` and `pit_lq_gate` alone.
    """

    rope_mode: str = "ntk_aware"
    lq_inject_mode: str = "controlnet"
    lq_in_channels: int = 0
    lq_latent_channels: int = 16
    lq_hidden_dim: int = 512
    lq_num_res_blocks: int = 4
    lq_latent_unpatchify_factor: int = 1
    lq_aux_rgb_head: bool = False
    lq_aux_rgb_head_latent_block_idx: int = -1
    lq_conv_padding_mode: str = "zeros"
    lq_gate_type: str = "sigma_aware_per_token_per_dim"
    lq_interval: int = 2
    zero_init_lq: bool = True
    train_lq_proj_only: bool = False
    sr_scale: int = 4
    latent_spatial_down_factor: int = 8
    pit_lq_inject: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_lq_options(self)

    @property
    def interval(self) -> int:
        """Patch blocks from one injection to the next; the reference reads 0 as 1."""
        return max(1, self.lq_interval)

    @property
    def lq_projection(self) -> LqProjection:
        """The LQ branch under this network's options."""
        return LqProjection(
            out_dim=self.hidden_size, hidden_dim=self.lq_hidden_dim,
            num_outputs=-(-self.patch_depth // self.interval), pit_output=self.pit_lq_inject,
            in_channels=self.lq_in_channels, latent_channels=self.lq_latent_channels,
            num_res_blocks=self.lq_num_res_blocks,
            latent_unpatchify_factor=self.lq_latent_unpatchify_factor,
            aux_rgb_head=self.lq_aux_rgb_head,
            aux_rgb_head_latent_block_idx=self.lq_aux_rgb_head_latent_block_idx,
            conv_padding_mode=self.lq_conv_padding_mode, gate_type=self.lq_gate_type,
            zero_init=self.zero_init_lq, sr_scale=self.sr_scale,
            latent_spatial_down_factor=self.latent_spatial_down_factor,
            patch_size=self.patch_size, dtype=self.dtype, constrain=self.constrain)

    def parameter_inits(self) -> dict[str, Init]:
        """The backbone's table with `lq_proj` and, when there is one, `pit_lq_gate`."""
        inits = super().parameter_inits() | {"lq_proj": self.lq_projection.init}
        if self.pit_lq_inject:
            inits["pit_lq_gate"] = functools.partial(gate_init, dim=self.hidden_size,
                                                     gate_type=self.lq_gate_type)
        return inits

    def __call__(self, x: jax.Array, t: jax.Array, y: jax.Array,
                 lq_latent: jax.Array | None = None, lq_image: jax.Array | None = None,
                 degrade_sigma: jax.Array | None = None, lq_mask: jax.Array | None = None,
                 mask: jax.Array | None = None, feature_indices: tuple[int, ...] = (),
                 return_features_early: bool = False,
                 return_lq_aux: bool = False) -> NetOutput:
        """Predicts from noised images and their low-quality versions.

        A call with neither `lq_latent` nor `lq_image` runs the backbone, gates skipped, as the
        reference does; any other LQ argument then raises UserError.

        Args:
          x, t, y, mask, feature_indices, return_features_early: as for PixelDiT.
          lq_latent: [B, h, w, lq_latent_channels], normalised as the codec gives it.
          lq_image: [B, h, w, lq_in_channels] in [-1, 1], for networks with an image branch.
          degrade_sigma: [B] float32, noise level of the latent in [0, 1], 0 when it is clean.
          lq_mask: [B], multiplies the LQ features; 0 drops those of a sample.
          return_lq_aux: also return `lq_rgb`, the auxiliary head's picture.
        """
        if not has_lq_input(self, x, lq_latent, lq_image, degrade_sigma, lq_mask, return_lq_aux):
            return self.run(x, t, y, mask, feature_indices, return_features_early)
        check_inputs(self, x, t, y, mask, feature_indices, return_features_early)
        grid = (x.shape[1] // self.patch_size, x.shape[2] // self.patch_size)
        lq = self.lq_projection(self.weights["lq_proj"], grid, lq_latent, lq_image, return_lq_aux)
        read = functools.partial(read_head, mask=lq_mask)
        self._sow_features(functools.partial(read, shared=lq.shared))

        def inject(head: Params, gate: Params, x: jax.Array) -> jax.Array:
            # A feature is read where it is injected, so that never all of them are in memory.
            return updated_by_tiles(self.tile_rows * grid[1], lambda x, shared: sigma_aware_gate(
                gate, x, read(head, shared), degrade_sigma), x, lq.shared)

        out = self.run(x, t, y, mask, feature_indices, return_features_early,
                       self._injection(inject), self._pixel_gate(inject))
        return out.replace(lq_rgb=lq.rgb)

    def _injection(self, inject: Callable) -> Injection:
        """What happens to the image tokens before every interval-th patch block."""
        branch = self.weights["lq_proj"]
        return Injection(self.interval, (branch["output_heads"], branch["gate_modules"]), None,
                         lambda params, x, _: inject(*params, x))

    def _pixel_gate(self, inject: Callable) -> Callable | None:
        """What happens to the condition of the pixel blocks."""
        if not self.pit_lq_inject:
            return None
        head, gate = self.weights["lq_proj"]["pit_head"], self.weights["pit_lq_gate"]
        return functools.partial(inject, head, gate)

    def _sow_features(self, read: Callable) -> None:
        """Shows the features to tests: [N, B, L, D] and the pixel blocks' [B, L, D]."""
        if self.is_mutable_collection("intermediates"):
            branch = self.weights["lq_proj"]
            self.sow("intermediates", "lq_proj", jax.vmap(read)(branch["output_heads"]))
            if self.pit_lq_inject:
                self.sow("intermediates", "lq_proj_pit", read(branch["pit_head"]))


def check_lq_options(net: PidNet) -> None:
    """Raises UserError for LQ options that no network can have."""
    if net.lq_inject_mode != "controlnet":
        raise UserError(f"lq_inject_mode is {net.lq_inject_mode!r}; 'controlnet' is the only one")
    if net.sr_scale < 1 or net.latent_spatial_down_factor < 1:
        raise UserError(f"sr_scale is {net.sr_scale} and latent_spatial_down_factor is"
                        f" {net.latent_spatial_down_factor}; both must be at least 1")
    net.lq_projection  # noqa: B018 - its own checks


def has_lq_input(net: PidNet, x, lq_latent, lq_image, degrade_sigma, lq_mask, aux: bool) -> bool:
    """Whether a call has an LQ input; raises UserError when its arguments contradict each other."""
    extras = {"degrade_sigma": degrade_sigma, "lq_mask": lq_mask, "return_lq_aux": aux or None}
    given = [name for name, value in extras.items() if value is not None]
    if lq_latent is None and lq_image is None:
        if given:
            raise UserError(f"PidNet needs lq_latent (or lq_image): {', '.join(given)} came without"
                            " one. Pass the latent, or no LQ argument at all to run the backbone")
        return False
    if net.enable_ed:
        raise UserError("the encoder-decoder path (enable_ed) changes the number of tokens, so LQ"
                        " features do not fit: call without LQ input or build without enable_ed")
    if degrade_sigma is None:
        raise UserError("PidNet needs degrade_sigma beside the LQ input: pass the latent's noise"
                        " level per sample, zeros for clean latents")
    check_per_sample(degrade_sigma=degrade_sigma, lq_mask=lq_mask)
    check_batches(x=x, lq_latent=lq_latent, lq_image=lq_image, degrade_sigma=degrade_sigma,
                  lq_mask=lq_mask)
    return True
