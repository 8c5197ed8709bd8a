"""Captions to the embeddings that PixelDiT and PiD were trained on: Gemma-2 behind an instruction.

A caption stands behind a long instruction ("complex human instruction"). Of the tokens of both, the
first and the last `length` - 1 are kept: the caption's own, as the instruction has told the network
to read them. All rows are used, padding too.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.encoders.caption_tokenizer import Tokenizer, load_tokenizer
from pid_jax.encoders.frozen import Frozen, check_dtype
from pid_jax.encoders.gemma2 import Gemma2
from pid_jax.encoders.instruction import INSTRUCTION
from pid_jax.encoders.protocols import TextEncoder
from pid_jax.encoders.stored_text import StoredTextEncoder
from pid_jax.encoders.weights import CARD, RANDOM, folder_of, open_weights, random_params, shapes_of
from pid_jax.errors import UserError
from pid_jax.models.layers import Params

TINY = {"vocab_size": 512, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "query_pre_attn_scalar": 8}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How captions become rows of token numbers.

    Attributes:
      tokenizer: splits text.
      instruction: text before every caption; "" for none.
      length: T, rows that are kept of every caption.
    """

    tokenizer: Tokenizer
    instruction: str
    length: int

    @functools.cached_property
    def total(self) -> int:
        """Tokens of instruction and caption together: longer ones are cut on the right."""
        if not self.instruction:
            return self.length
        return len(self.tokenizer.encode(self.instruction)) + self.length - 2

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """int32 [T]: the first position and the last T - 1. The instruction's last token, a space
        that mostly melts into the caption's first word, counts to the caption."""
        last = np.arange(self.total - self.length + 1, self.total)
        return np.concatenate([[0], last]).astype(np.int32)

    def ids(self, captions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """int32 [B, total] token numbers, padded on the right; bool [B, total], true at them."""
        rows = [self.tokenizer.encode(self.instruction + caption)[:self.total]
                for caption in captions]
        ids = np.full((len(rows), self.total), self.tokenizer.pad, np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, (ids_row, mask_row) in zip(rows, zip(ids, mask)):
            ids_row[:len(row)], mask_row[:len(row)] = row, True
        return ids, mask


class GemmaTextEncoder(Frozen):
    """The `TextEncoder` of the released models.

    Captions run `batch` at a time, divided over the devices of this process; the weights are on
    each of them.
    """

    def __init__(self, network: Gemma2, read: Callable[[], Params],
                 make_layout: Callable[[], Layout], length: int, batch: int = 8):
        """Args:
          network: Gemma-2; its hidden size is the width.
          read: gives the parameters; called at their first use.
          make_layout: gives the layout; called at its first use.
          length: T of the layout.
          batch: captions that are embedded at a time.
        """
        super().__init__(read)
        self.network, self.length, self._batch = network, length, batch
        self._make_layout = make_layout
        self._embed = jax.jit(self._embedded)

    def shapes(self) -> Params:
        """Those of the network."""
        return shapes_of(self.network)

    @property
    def width(self) -> int:
        """Size E of one embedding."""
        return self.network.hidden_size

    @functools.cached_property
    def layout(self) -> Layout:
        """The tokenizer with its instruction; read at the first call.

        Raises: UserError when it splits into tokens that the network does not know.
        """
        layout, known = self._make_layout(), self.network.vocab_size
        if layout.tokenizer.size > known:
            raise UserError(f"the tokenizer has {layout.tokenizer.size} tokens, but this Gemma-2 "
                            f"knows {known}; put the one that was published with its weights "
                            "beside them, or name it as config.text.tokenizer")
        return layout

    @functools.cached_property
    def null(self) -> np.ndarray:
        """float32 [T, E], the embedding of the empty caption."""
        return self.embed([""])[0]

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """B captions -> float32 [B, T, E]; equal captions are computed once."""
        unique = list(dict.fromkeys(captions))
        found = np.concatenate([self._embed_some(unique[start:start + self._batch])
                                for start in range(0, len(unique), self._batch)])
        place = {caption: row for row, caption in enumerate(unique)}
        return found[[place[caption] for caption in captions]]

    def load(self) -> None:
        """Reads weights and tokenizer now. Raises: UserError for what is missing."""
        self.params, self.layout  # noqa: B018 (both are read once)

    def _embed_some(self, captions: Sequence[str]) -> np.ndarray:
        rows = [*captions, *[""] * (self._rows - len(captions))]
        arrays = jax.device_put(self.layout.ids(rows), self._placement("batch"))
        out = self._embed(self.placed(self._placement()), *arrays, self.layout.kept)
        return np.asarray(out)[:len(captions)]

    @property
    def _rows(self) -> int:
        """`batch`, up to a multiple of the devices, so that one program serves all calls."""
        return -(-self._batch // jax.local_device_count()) * jax.local_device_count()

    def _placement(self, *axes: str) -> NamedSharding:
        mesh = Mesh(np.array(jax.local_devices()), ("batch",))
        return NamedSharding(mesh, PartitionSpec(*axes))

    def _embedded(self, params: Params, ids: jax.Array, mask: jax.Array,
                  kept: jax.Array) -> jax.Array:
        hidden = self.network.apply({"params": params}, ids, mask)
        return hidden[:, kept].astype(jnp.float32)


def open_text_encoder(width: int = 2304, length: int = 300,
                      instruction: Sequence[str] = INSTRUCTION, weights: str = "",
                      tokenizer: str = "", dtype: str = "bfloat16", attn_softcap: float = 0.0,
                      batch: int = 8, stored: str = "") -> TextEncoder:
    """Gemma-2 as text encoder.

    Args:
      width: embedding size that is expected of the weights.
      length: tokens T of every caption.
      instruction: lines that stand before every caption; () for none.
      weights: folder with the weights (see `encoders.weights`), or "random" for a tiny network with
        random ones.
      tokenizer: its file; "": the one in the folder of the weights.
      dtype: "bfloat16", as the reference computes, or "float32".
      attn_softcap: see `Gemma2`.
      batch: captions that are embedded at a time.
      stored: folder of embeddings that `pid_jax.embed_captions` made; they are looked up, and
        neither weights nor tokenizer are needed.
    Raises:
      UserError: the weights, or what is stored, are of another width or length; options that are
        none.
    """
    _check_options(length, instruction, attn_softcap, batch)
    if stored:
        return _open_stored(stored, width, length, instruction, attn_softcap)
    options = {"dtype": check_dtype(dtype), "attn_softcap": attn_softcap}
    if weights == RANDOM:
        network, read = Gemma2(hidden_size=width, **TINY, **options), random_params
    else:
        opened = open_weights("gemma2", weights)
        network = opened.make(lambda **held: Gemma2(**held | options))
        read = opened.read
    if network.hidden_size != width:
        folder = folder_of("gemma2", weights)
        held = f"{folder} holds a" if (folder / CARD).exists() else "the published weights are of a"
        raise UserError(f"config.text.width is {width}, but {held} Gemma-2 of width "
                        f"{network.hidden_size}; set the width, and that of the network, to it")
    file = Path(tokenizer) if tokenizer else folder_of("gemma2", weights)
    return GemmaTextEncoder(
        network, lambda: read(shapes_of(network)),
        lambda: Layout(load_tokenizer(file), "\n".join(instruction), length), length, batch)


def _check_options(length: int, instruction: Sequence[str], attn_softcap: float,
                   batch: int) -> None:
    for name, value in (("length", length), ("batch", batch)):
        if value < 1:
            raise UserError(f"config.text.{name} is {value}; expected at least 1")
    if isinstance(instruction, str):
        raise UserError(f"config.text.instruction is {instruction[:40]!r}; expected a tuple of "
                        "lines, such as ('Describe:',), or () for none")
    if attn_softcap < 0:
        raise UserError(f"config.text.attn_softcap is {attn_softcap}; expected a number above 0, "
                        "such as 50, or 0 for none")


def _open_stored(folder: str, width: int, length: int, instruction: Sequence[str],
                 attn_softcap: float) -> StoredTextEncoder:
    encoder = StoredTextEncoder(folder)
    if (encoder.width, encoder.length) != (width, length):
        raise UserError(f"the caption embeddings in {folder} have {encoder.length} tokens of width "
                        f"{encoder.width}, config.text asks for {length} of width {width}")
    made_by = {"instruction": INSTRUCTION, "attn_softcap": 0.0} | encoder.made_by
    wanted = {"name": "gemma2", "instruction": list(instruction), "attn_softcap": attn_softcap}
    for name, value in wanted.items():
        held = made_by.get(name)
        if (list(held) if name == "instruction" else held) != value:
            raise UserError(f"the caption embeddings in {folder} were made with text.{name} "
                            f"{str(held)[:60]!r}, config.text asks for {str(value)[:60]!r}; make "
                            "them equal, or embed the captions anew")
    return encoder
