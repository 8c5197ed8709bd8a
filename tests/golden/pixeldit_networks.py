"""Golden cases of the family pixeldit: position and time tables, forward passes of both networks.

Parameters lie in the case under `params/`. Layouts change at the border only.
"""

import re
from typing import Any

import jax
import numpy as np

from pid_jax.diffusion import guidance
from pid_jax.models import build_model, option_names
from pid_jax.models.layers import sincos_table, time_waves
from pid_jax.models.rope import image_rope
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tests.golden.networks import GoldenNet
from tools.convert_torch_weights.mappings import table_for, torch_to_jax

TABLE_MODES = {"rope2d": "original", "ropeex2d": "extrapolated"}
LARGE_TIME, LARGE_TIME_ATOL = 999.5, 1e-3  # the case's note on t = 1000
PROJECTOR = "repa_projector."
PARAMS_OF = {"pixeldit_c2i": "params/", "pixeldit_t2i": "params/core."}


def load_network(case: Case, model: str, projector: dict[str, np.ndarray] | None = None
                 ) -> GoldenNet:
    """The network of a case, with a projector {"0.weight": ...} where one is given."""
    options = {key: value for key, value in case.meta["config"].items()
               if key in option_names(model)}
    tensors = case.under(PARAMS_OF[model])
    if projector:
        options |= {"repa_features": len(projector["4.weight"]),
                    "repa_width": projector["4.weight"].shape[1]}
        tensors |= {PROJECTOR + name: value for name, value in projector.items()}
    table = table_for(model, options)
    return GoldenNet(build_model(model, **options), torch_to_jax(table, tensors), table)


def compare(case: Case, actual: Any, expected: np.ndarray, name: str) -> None:
    """Within the case's plain tolerance."""
    assert_close(actual, expected, case.tolerance.get("atol", 0.0),
                 case.tolerance.get("rtol", 0.0), name)


@handles("pixeldit", r"c2i_pos_time.*")
def check_tables(case: Case) -> None:
    for name, expected in case.outputs.items():
        if match := re.fullmatch(r"(\w+)_d(\d+)_h(\d+)_w(\d+)_(cos|sin)", name):
            kind, head_dim, rows, columns = match[1], *map(int, match.group(2, 3, 4))
            table = image_rope(head_dim, (rows, columns), TABLE_MODES[kind])
            compare(case, getattr(table, match[5]), expected, name)
        elif match := re.fullmatch(r"sincos_D(\d+)_h(\d+)_w(\d+)", name):
            compare(case, _pixel_table(*map(int, match.groups())), expected, name)
        else:
            _compare_waves(case, time_waves(case.inputs["t"], int(name.split("_")[1])), expected,
                           name)


def _pixel_table(channels: int, height: int, width: int) -> np.ndarray:
    """[H, W, channels]: the column's table, then the row's."""
    column, row = (sincos_table(n, channels // 2).T for n in (width, height))
    shape = (height, width, channels // 2)
    return np.concatenate([np.broadcast_to(column, shape),
                           np.broadcast_to(row[:, None], shape)], axis=-1)


def _compare_waves(case: Case, waves: Any, expected: np.ndarray, name: str) -> None:
    large = case.inputs["t"] >= LARGE_TIME
    compare(case, waves[~large], expected[~large], name)
    assert_close(waves[large], expected[large], LARGE_TIME_ATOL, name=f"{name} at large times")


@handles("pixeldit", r"c2i_forward.*")
def check_class_conditional(case: Case) -> None:
    network, inputs = load_network(case, "pixeldit_c2i"), case.inputs
    x, t, y = to_nhwc(inputs["x"]), inputs["t"], inputs["y"]

    @jax.jit
    def run(params, x, y):
        out, state = network(params, x, t, y, mutable="intermediates")
        return out.x, state["intermediates"]

    null = np.full_like(y, network.net.null_label)
    (v, taps), (v_null, _) = run(network.params, x, y), run(network.params, x, null)
    found = {"v": to_nchw(v), "v_null": to_nchw(v_null), **_class_taps(taps)}
    for name, expected in case.outputs.items():
        if match := re.fullmatch(r"cfg_([\d.]+)", name):
            found[name] = to_nchw(guidance.guide(v_null, v, float(match[1])))
        compare(case, found[name], expected, name)
    tokens = taps["patch_blocks"][0][-1]
    again = jax.jit(lambda: network(network.params, x, t, y, patch_tokens=tokens).x)()
    compare(case, to_nchw(again), case.outputs["v"], "v from cached patch tokens")


def _class_taps(intermediates: dict) -> dict[str, np.ndarray]:
    (blocks,), (pixels,) = intermediates["patch_blocks"], intermediates["pixel_blocks"]
    return {"t_emb": intermediates["t_embedder"][0], "patch_embed": intermediates["s_embedder"][0],
            "pixel_embed": per_pixel(intermediates["pixel_embedder"][0]),
            **{f"patch_block_{i}": tokens for i, tokens in enumerate(blocks)},
            **{f"pixel_block_{i}": per_pixel(z) for i, z in enumerate(pixels)}}


def per_pixel(z: Any) -> np.ndarray:
    """[B, L, C, P] -> [B * L, P, C]."""
    return np.asarray(z).swapaxes(-1, -2).reshape(-1, z.shape[-1], z.shape[-2])


@handles("pixeldit", r"t2i_forward.*")
def check_text_to_image(case: Case) -> None:
    network, inputs = load_network(case, "pixeldit_t2i"), case.inputs

    @jax.jit
    def run(params):
        out, state = network(params, to_nhwc(inputs["x"]), inputs["t"], inputs["y"],
                             mutable="intermediates")
        return out.x, state["intermediates"]

    v, taps = run(network.params)
    ((images, texts),), (pixels,) = taps["patch_blocks"], taps["pixel_blocks"]
    found = {"v": to_nchw(v),
             **{f"patch_block_{i}_img": tokens for i, tokens in enumerate(images)},
             **{f"patch_block_{i}_txt": tokens for i, tokens in enumerate(texts)},
             **{f"pixel_block_{i}": per_pixel(z) for i, z in enumerate(pixels)}}
    for name, expected in case.outputs.items():
        compare(case, found[name], expected, name)
