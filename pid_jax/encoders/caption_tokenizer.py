"""Text to token numbers, by a `tokenizer.json` or a sentencepiece `tokenizer.model`."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pid_jax.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.

    Attributes:
      split: text -> token numbers, without any special token around them.
      begin, pad: numbers of the tokens that begin a text and fill it up.
      size: of the vocabulary; all numbers are below it.
    """

    split: Callable[[str], list[int]]
    begin: int
    pad: int
    size: int

    def encode(self, text: str) -> list[int]:
        """The beginning token and those of the text; "?" stands for what UTF-8 cannot hold."""
        return [self.begin, *self.split(text.encode("utf-8", "replace").decode())]


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer file, or the one that a folder holds.

    Raises:
      UserError: there is none, it cannot be read, or the package that reads it is not installed.
    """
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise UserError(f"the tokenizer is missing: {path} holds no {' or '.join(FILES)}; they are "
                        "published with the text encoder's weights, copy one there")
    try:
        return _read_json(file) if file.suffix == ".json" else _read_model(file)
    except UserError:
        raise
    except Exception as error:  # both packages raise errors of many kinds from compiled code
        raise UserError(f"the tokenizer {file} cannot be read: {error}") from error


def _read_json(file: Path) -> Tokenizer:
    tokenizer = _package("tokenizers").Tokenizer.from_file(str(file))
    begin, pad = (tokenizer.token_to_id(token) for token in ("<bos>", "<pad>"))
    if begin is None or pad is None:
        raise UserError(f"the tokenizer {file} has no tokens <bos> and <pad>; it is not Gemma's")
    return Tokenizer(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, begin, pad,
                     tokenizer.get_vocab_size())


def _read_model(file: Path) -> Tokenizer:
    processor = _package("sentencepiece").SentencePieceProcessor(model_file=str(file))
    return Tokenizer(processor.encode, processor.bos_id(), processor.pad_id(),
                     processor.get_piece_size())


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this tokenizer needs the package {name}: pip install "
                        "'pid_jax[text]'") from error
