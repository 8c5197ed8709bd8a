"""Tells from names and shapes which network a set of weights belongs to, and with which options.

Each derived option is one row: where to look, what the shape says, and the words for people.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Recognised:
    """What a set of weights is.

    Attributes:
      model: name for `build_model`, or of a network that this project has no table for, or None.
      options: options that the shapes determine.
      reasons: one line for each conclusion.
    """

    model: str | None
    options: Mapping[str, object]
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """`option` is `value(shape of key)`, explained by `words`."""

    option: str
    key: str
    value: Callable[[tuple[int, ...]], object]
    words: str


def _rows(shape):
    return shape[0]


def _columns(shape):
    return shape[1]


_T2I = (
    Row("hidden_size", "s_embedder.proj.weight", _rows, "rows"),
    Row("patch_size", "s_embedder.proj.weight", lambda s: math.isqrt(s[1] // 3),
        "columns are 3 colours times the patch's pixels"),
    Row("pixel_hidden_size", "pixel_embedder.proj.weight", _rows, "rows"),
    Row("txt_embed_dim", "y_embedder.proj.weight", _columns, "columns"),
    Row("txt_max_length", "y_pos_embedding", _columns, "its tokens"),
    Row("pixel_attn_hidden_size", "pixel_blocks.0.compress_to_attn.weight", _rows, "rows"),
)
_LQ = (
    Row("lq_hidden_dim", "lq_proj.output_heads.0.weight", _columns, "columns"),
    Row("lq_gate_type", "lq_proj.gate_modules.0.content_proj.weight",
        lambda s: "sigma_aware_per_token" if s[0] == 1 else "sigma_aware_per_token_per_dim",
        "one gate value a token, or one a channel"),
)
_CLASS_CONDITIONAL = (
    _T2I[0], _T2I[1], _T2I[2],
    Row("num_classes", "y_embedder.embedding_table.weight", lambda s: s[0] - 1,
        "rows less the one for no class"),
)
# What a network is, by keys that only it has. The first match counts.
SIGNATURES = (
    ("pidnet", "lq_proj.output_heads.0.weight"),
    ("pixeldit_c2i", "y_embedder.embedding_table.weight"),
    ("pixeldit_t2i", "patch_blocks.0.attn.qkv_x.weight"),
    ("discriminator", "cls_pred_heads.0.0.weight"),
    ("titok", "encoder.latent_token_positional_embedding"),
)


def recognise(shapes: Shapes) -> Recognised:
    """Names the network that has tensors of these names and shapes."""
    for model, key in SIGNATURES:
        if key in shapes:
            found = _Findings(shapes, [f"model {model}: only it has {key}"])
            DERIVATIONS.get(model, lambda findings: None)(found)
            return Recognised(model, found.options, tuple(found.reasons))
    return Recognised(None, {}, ("no known network has tensors of these names",))


class _Findings:
    """Collects options with their reasons; a row whose key is absent or odd is left out."""

    def __init__(self, shapes: Shapes, reasons: list[str]):
        self.shapes, self.reasons, self.options = shapes, reasons, {}

    def add(self, option: str, value: object, reason: str) -> None:
        self.options[option] = value
        self.reasons.append(f"{option} {value}: {reason}")

    def read(self, rows: tuple[Row, ...]) -> None:
        for row in rows:
            shape = self.shapes.get(row.key, ())
            if len(shape) > 1:
                self.add(row.option, row.value(shape), f"{row.words} of {row.key} {list(shape)}")

    def count(self, pattern: str) -> int:
        """How many different numbers stand for `{i}` in the names that start like `pattern`."""
        head = re.compile(re.escape(pattern).replace(r"\{i\}", r"(\d+)"))
        return len({match[1] for name in self.shapes if (match := head.match(name))})

    def add_count(self, option: str, pattern: str) -> None:
        self.add(option, self.count(pattern), f"number of {pattern}")

    def add_presence(self, option: str, key: str) -> None:
        there = key in self.shapes
        self.add(option, there, f"{key} is {'there' if there else 'not there'}")

    def heads(self, option: str, width: str, norm_key: str) -> None:
        """The head width is the length of the q norm."""
        shape = self.shapes.get(norm_key, ())
        if len(shape) == 1 and shape[0] and width in self.options:
            self.add(option, self.options[width] // shape[0],
                     f"{width} {self.options[width]} / {norm_key} {list(shape)}")


def _pixeldit_t2i(found: _Findings) -> None:
    found.read(_T2I)
    found.add_count("patch_depth", "patch_blocks.{i}.")
    found.add_count("pixel_depth", "pixel_blocks.{i}.")
    found.heads("num_groups", "hidden_size", "patch_blocks.0.attn.q_norm_x.weight")
    found.heads("pixel_num_groups", "pixel_attn_hidden_size", "pixel_blocks.0.attn.q_norm.weight")
    if stages := found.count("encoder_ed.stages.{i}."):
        _encoder_decoder(found, stages)


def _encoder_decoder(found: _Findings, stages: int) -> None:
    stage = "encoder_ed.stages.0"
    found.add("enable_ed", True, f"{stages} stages encoder_ed.stages")
    found.add("ed_compress_ratio", 2**stages, f"2 to the number of stages, {stages}")
    found.add_count("ed_depth_per_stage", f"{stage}.blocks.{{i}}.")
    found.read((
        Row("ed_hidden_size", f"{stage}.blocks.0.attn.proj.weight", _rows, "rows"),
        Row("ed_window_size", f"{stage}.compress.proj_down.weight",
            lambda s: math.isqrt(s[1] // max(s[0], 1)), "square root of columns by rows"),
    ))
    found.heads("ed_num_heads", "ed_hidden_size", f"{stage}.blocks.0.attn.q_norm.weight")
    found.add_presence("ed_use_token_shuffle", f"{stage}.blocks.0._ts_compress.proj_down.weight")


def _pidnet(found: _Findings) -> None:
    _pixeldit_t2i(found)
    found.read(_LQ)
    depth, heads = found.options["patch_depth"], found.count("lq_proj.output_heads.{i}.")
    intervals = [n for n in range(1, depth + 1) if math.ceil(depth / n) == heads]
    if len(intervals) == 1:
        found.add("lq_interval", intervals[0], f"{depth} blocks, {heads} lq_proj.output_heads")
    _branches(found)
    found.add_presence("pit_lq_inject", "pit_lq_gate.log_alpha")


def _branches(found: _Findings) -> None:
    """Stem and ResBlocks; channels count after unpatchifying or folding."""
    shapes, patch = found.shapes, found.options.get("patch_size", 0)
    aux = shapes.get("lq_proj.lq_aux_rgb_head.3.weight", ())
    found.add_presence("lq_aux_rgb_head", "lq_proj.lq_aux_rgb_head.3.weight")
    branch = "latent_proj" if "lq_proj.latent_proj.0.weight" in shapes else "image_conv"
    found.add("lq_num_res_blocks", max(0, found.count(f"lq_proj.{branch}.{{i}}.") - 2),
              f"entries of lq_proj.{branch} less the two convolutions")
    image = shapes.get("lq_proj.image_conv.0.weight", ())
    found.add("lq_in_channels", 3 if image else 0,
              f"lq_proj.image_conv is {'there' if image else 'not there'}")
    if "lq_proj.latent_proj.0.weight" not in shapes:
        found.add("lq_latent_channels", 0, "there is no lq_proj.latent_proj")
    for tensor, key, axis in ((aux, "lq_aux_rgb_head.3", 0), (image, "image_conv.0", 1)):
        cell = math.isqrt(tensor[axis] // 3) if len(tensor) > 1 else 0
        if cell and patch % cell == 0:
            found.add("sr_scale", patch // cell,
                      f"patch_size {patch} / cell {cell} of lq_proj.{key} {list(tensor)}")


def _pixeldit_c2i(found: _Findings) -> None:
    found.read(_CLASS_CONDITIONAL)
    found.add_count("patch_depth", "patch_blocks.{i}.")
    found.add_count("pixel_depth", "pixel_blocks.{i}.")
    found.heads("num_groups", "hidden_size", "patch_blocks.0.attn.q_norm.weight")


def _discriminator(found: _Findings) -> None:
    found.read((Row("inner_dim", "cls_pred_heads.0.0.weight", _columns, "columns"),))
    pattern = "cls_pred_heads.0.{i}.weight"
    convolutions = [shape for name, shape in found.shapes.items()
                    if name.startswith("cls_pred_heads.0.") and len(shape) == 4]
    if convolutions:
        found.add("num_conv_layers", len(convolutions), f"convolutions of {pattern}")


def _titok(found: _Findings) -> None:
    found.read((
        Row("num_latent_tokens", "latent_tokens", _rows, "rows"),
        Row("codebook_size", "quantize.embedding.weight", _rows, "rows"),
        Row("token_size", "quantize.embedding.weight", _columns, "columns"),
        Row("vit_enc_patch_size", "encoder.patch_embed.weight", lambda s: s[-1], "width"),
    ))


DERIVATIONS: dict[str, Callable[[_Findings], None]] = {
    "pixeldit_t2i": _pixeldit_t2i, "pidnet": _pidnet, "pixeldit_c2i": _pixeldit_c2i,
    "discriminator": _discriminator, "titok": _titok,
}
