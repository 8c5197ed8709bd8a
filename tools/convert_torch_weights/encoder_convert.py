"""The frozen encoders' published weights to folders that `pid_jax.encoders.weights` reads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pid_jax.encoders import autoencoder_codec, caption_tokenizer, representation_codec
from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.encoders.weights import CARD, FORMAT, ORIGINS, TENSORS
from pid_jax.errors import UserError
from pid_jax.files import atomic_write
from tools.convert_torch_weights import licences
from tools.convert_torch_weights.assembly import assembled_leaves
from tools.convert_torch_weights.card import sha256
from tools.convert_torch_weights.convert import refuse_existing, replacing
from tools.convert_torch_weights.encoder_sizes import (autoencoder_sizes, decoder_sizes,
                                                       gemma_options, read_config, vit_sizes)
from tools.convert_torch_weights.mappings import Table
from tools.convert_torch_weights.mappings.encoders import encoder_table, known_naming, used
from tools.convert_torch_weights.mappings.engine import check_shapes
from tools.convert_torch_weights.matching import check_finite
from tools.convert_torch_weights.readers import LazyTensor, Source, open_source
from tools.convert_torch_weights.readers.tensors import TORCH_DTYPES
from tools.convert_torch_weights.safetensors_writer import write_safetensors

KEPT = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class EncoderRequest:
    """What to convert.

    Attributes:
      name: of the encoder, a key of `weights.ORIGINS`.
      sources: part ("model", "decoder", "stats", ...) -> file or folder.
      dst: the folder to make.
      dtype: of the result; None for the source's own.
      overwrite: replace a folder that an earlier conversion made.
    """

    name: str
    sources: Mapping[str, str]
    dst: Path
    dtype: str | None = None
    overwrite: bool = False


@dataclasses.dataclass
class Converted:
    """Leaves by path, the networks' options, the sources, and keys with bad numbers."""

    leaves: dict[str, LazyTensor]
    network: dict[str, Any]
    sources: list[Source]
    not_finite: list[str]
    files: dict[str, Path] = dataclasses.field(default_factory=dict)  # copied as they are


def convert_encoder(request: EncoderRequest) -> dict[str, Any]:
    """Converts; the destination appears complete or not at all. Returns its header.

    Raises:
      UserError: unreadable sources, weights of another encoder, values that are not finite, a
        destination that exists.
    """
    _refuse_destination(request)
    converted = CONVERTERS[request.name](request)
    card = _card(request, converted)
    with replacing(request.dst) as folder:
        with atomic_write(folder / TENSORS, "wb") as file:
            write_safetensors(file, list(converted.leaves.values()), {})
        check_finite(converted.sources[0].path, converted.not_finite)
        for name, path in converted.files.items():
            with atomic_write(folder / name, "wb") as file:
                file.write(path.read_bytes())
        with atomic_write(folder / CARD) as file:
            json.dump(card, file, indent=2)
    return card


def _refuse_destination(request: EncoderRequest) -> None:
    names = (CARD, TENSORS, *caption_tokenizer.FILES)
    refuse_existing(request.dst, request.overwrite, CARD,
                    lambda: {request.dst / name for name in names})


def _card(request: EncoderRequest, converted: Converted) -> dict[str, Any]:
    return {"format": FORMAT, "encoder": request.name, "what": ORIGINS[request.name].what,
            "network": converted.network,
            "parameters": sum(leaf.size for leaf in converted.leaves.values()),
            "dtype": sorted({leaf.dtype.name for leaf in converted.leaves.values()}),
            "sources": {str(file.name): sha256(file) for source in converted.sources
                        for file in source.files},
            "licence": licences.licence_note(licences.UNKNOWN)}


def opened(request: EncoderRequest, part: str = "model") -> Source:
    """The source of a part; UserError when the request has none."""
    if part not in request.sources:
        flag = "--src" if part == "model" else f"--{part}"
        raise UserError(f"the encoder {request.name!r} is made of several files, and {flag} is "
                        f"missing: {ORIGINS[request.name].flags}")
    return open_source(request.sources[part])


def leaves_of(table: Table, tensors: Mapping[str, LazyTensor], request: EncoderRequest,
              not_finite: list[str], prefix: str = "") -> dict[str, LazyTensor]:
    """The leaves of a table under `prefix`, each read in its turn."""
    check_shapes(table, _shapes(tensors))
    dtype = result_dtype(request.dtype, tensors)
    leaves = assembled_leaves(table, tensors, dtype, not_finite)
    return {f"{prefix}{path}": dataclasses.replace(leaf, name=f"{prefix}{path}")
            for path, leaf in leaves.items()}


def result_dtype(wanted: str | None, tensors: Mapping[str, LazyTensor]) -> np.dtype:
    """The wanted dtype, or the one that all tensors have, or float32."""
    held = {tensor.dtype.name for tensor in tensors.values()}
    same = held.pop() if len(held) == 1 else "float32"
    return TORCH_DTYPES[wanted or (same if same in KEPT else "float32")]


# ---- auto-encoders -------------------------------------------------------------------------------

def _autoencoder(request: EncoderRequest) -> Converted:
    source = opened(request)
    tensors = {key.removeprefix("first_stage_model.").removeprefix("vae."): tensor
               for key, tensor in source.tensors.items()}
    naming = known_naming(tensors, str(source.path))
    shapes = _shapes(tensors)
    sizes = autoencoder_sizes(naming, shapes)
    _refuse_other_family(request.name, naming, sizes.get("z_channels"), shapes, source.path)
    table = encoder_table(autoencoder_codec.network_of(request.name, **sizes), naming)
    wanted = {key: tensors[key] for key in used(naming, tensors)
              if key in table.entries or request.name != "flux"}
    bad: list[str] = []
    return Converted(leaves_of(table, wanted, request, bad), sizes, [source], bad)


def _refuse_other_family(name: str, naming: str, z_channels: int | None, shapes: Mapping,
                         path: Path) -> None:
    """Tells families apart by latent channels, folding and kind of names."""
    def kind(family: str) -> tuple:
        options = autoencoder_codec.FAMILIES[family].network
        return (options.get("z_channels", 16), options.get("patch", 1) > 1,
                options.get("norm") == "channel")

    found = (z_channels, "bn.running_mean" in shapes, naming in ("wan2d", "diffusers3d"))
    if found != kind(name):
        fitting = [family for family in autoencoder_codec.FAMILIES if kind(family) == found]
        held = " or ".join(ORIGINS[family].what for family in fitting) or "an unknown family"
        raise UserError(f"{path} holds the auto-encoder of {held}, not that of "
                        f"{ORIGINS[name].what}; name it with --name")


# ---- representation auto-encoders ----------------------------------------------------------------

def _representation(request: EncoderRequest) -> Converted:
    name, bad = request.name, []
    statistics = representation_codec.FAMILIES[name].statistics
    sources = [opened(request), opened(request, "decoder")]
    sources += [opened(request, "stats")] if statistics else []
    encoder, decoder, *stats = (source.tensors for source in sources)
    _expect(name, encoder, sources[0])
    _expect("mae_decoder", decoder, sources[1])
    config = _decoder_config(request)
    heads = {"num_heads": config["decoder_num_attention_heads"]} if config else {}
    network = {"encoder": vit_sizes(name, _shapes(encoder)),
               "decoder": decoder_sizes(_shapes(decoder)) | heads}
    vit, mae = representation_codec.networks_of(name, network["encoder"], network["decoder"])
    leaves = leaves_of(encoder_table(vit, name), _used(name, encoder), request, bad, "encoder/")
    leaves |= leaves_of(encoder_table(mae, "mae_decoder"), decoder, request, bad, "decoder/")
    if statistics:
        leaves |= _statistics(stats[0], sources[2])
    return Converted(leaves, network, sources, bad)


def _expect(naming: str, tensors: Mapping[str, LazyTensor], source: Source) -> None:
    found = known_naming(tensors, str(source.path))
    if found != naming:
        raise UserError(f"{source.path} holds weights of the kind {found}, expected {naming}")


def _decoder_config(request: EncoderRequest) -> dict[str, Any]:
    """The published sizes of the decoder: Scale-RAE's needs them, for its heads."""
    named = request.sources.get("decoder_config")
    if named is None and request.name == "siglip":
        raise UserError("the decoder's heads are told by no shape; name its JSON with "
                        "--decoder_config")
    if named and "decoder_num_attention_heads" not in (config := read_config(Path(named))):
        raise UserError(f"{named} has no decoder_num_attention_heads; is it the decoder's config?")
    return config if named else {}


def _statistics(tensors: Mapping[str, LazyTensor], source: Source) -> dict[str, LazyTensor]:
    """Mean and variance [C, h, w] -> [h, w, C], always in float32."""
    wanted = {name: tensors.get(name) for name in ("mean", "var")}
    if not all(tensor is not None and len(tensor.shape) == 3 for tensor in wanted.values()):
        raise UserError(f"{source.path} holds no mean and var of the form [channels, rows, columns]")
    return {f"stats/{name}": LazyTensor(
        f"stats/{name}", TORCH_DTYPES["float32"], (*tensor.shape[1:], tensor.shape[0]),
        lambda tensor=tensor: np.ascontiguousarray(np.moveaxis(tensor.read(), 0, -1), np.float32))
        for name, tensor in wanted.items()}


def _shapes(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[int, ...]]:
    return {key: tensor.shape for key, tensor in tensors.items()}


def _used(naming: str, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    return {key: tensors[key] for key in used(naming, tensors)}


# ---- text ----------------------------------------------------------------------------------------

def _gemma(request: EncoderRequest) -> Converted:
    source = opened(request)
    tensors = {key.removeprefix("model."): tensor for key, tensor in source.tensors.items()}
    if known_naming(tensors, str(source.path)) != "gemma2":
        raise UserError(f"{source.path} does not hold a Gemma-2; name its folder or index file")
    folder = source.path if source.path.is_dir() else source.path.parent
    tensors = _used("gemma2", tensors)
    options = gemma_options(_shapes(tensors), folder)
    bad: list[str] = []
    leaves = leaves_of(encoder_table(Gemma2(**options), "gemma2"), tensors, request, bad)
    return Converted(leaves, options, [source], bad, _tokenizer_file(request, folder))


def _tokenizer_file(request: EncoderRequest, folder: Path) -> dict[str, Path]:
    """The tokenizer to copy beside the weights, under its name."""
    named = request.sources.get("tokenizer")
    candidates = [Path(named)] if named else [folder / name for name in caption_tokenizer.FILES]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise UserError(f"the tokenizer is missing: there is no {' or '.join(map(str, candidates))}"
                        "; it is published with the weights, name it with --tokenizer")
    caption_tokenizer.load_tokenizer(found)
    return {f"tokenizer{found.suffix}": found}


CONVERTERS = {
    **dict.fromkeys(autoencoder_codec.FAMILIES, _autoencoder),
    **dict.fromkeys(representation_codec.FAMILIES, _representation), "gemma2": _gemma}
