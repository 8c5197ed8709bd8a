"""A picture's tokens as a file: 16 bytes that say what they are, then the packed indices.

    "PDTK", version, bits of an index, number of indices (little endian), 8 bytes of the
    fingerprint of the tokenizer; then the indices, most significant bit first

32 tokens of a codebook of 4096 take 48 bytes behind the header, of 1024 they take 40.
"""

import struct
from pathlib import Path

import numpy as np

from pid_jax.errors import UserError
from pid_jax.files import atomic_write

MAGIC, VERSION = b"PDTK", 1
HEADER = struct.Struct("<4sBBH8s")
ENDING = ".tok"


def index_bits(codebook_size: int) -> int:
    """Bits that every index of a codebook takes."""
    return max(1, (codebook_size - 1).bit_length())


def to_bytes(indices: np.ndarray, codebook_size: int, fingerprint: str) -> bytes:
    """The file of one picture's indices int [K]."""
    bits = index_bits(codebook_size)
    header = HEADER.pack(MAGIC, VERSION, bits, len(indices), bytes.fromhex(fingerprint)[:8])
    digits = (np.asarray(indices, np.int64)[:, None] >> np.arange(bits)[::-1]) & 1
    return header + np.packbits(digits.astype(np.uint8)).tobytes()


def from_bytes(data: bytes, codebook_size: int, fingerprint: str, where: str) -> np.ndarray:
    """The inverse: int32 [K].

    Raises UserError for a file that is no token file, is damaged, or is of another tokenizer.
    """
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise UserError(f"{where} is no token file: it does not begin with {MAGIC.decode()}; make "
                        "one with `python -m pid_jax.tokens encode`")
    _, version, bits, count, tokenizer = HEADER.unpack_from(data)
    payload = data[HEADER.size:]
    if version != VERSION or len(payload) != -(-bits * count // 8):
        raise UserError(f"{where} is damaged: version {version}, {len(payload)} bytes for {count} "
                        f"indices of {bits} bits")
    if bits != index_bits(codebook_size) or tokenizer != bytes.fromhex(fingerprint)[:8]:
        raise UserError(f"{where} was made by another tokenizer than this checkpoint's; decode it "
                        "with a checkpoint that has the same frozen weights")
    digits = np.unpackbits(np.frombuffer(payload, np.uint8), count=bits * count)
    return (digits.reshape(count, bits) @ (1 << np.arange(bits)[::-1])).astype(np.int32)


def write(path: Path, indices: np.ndarray, codebook_size: int, fingerprint: str) -> int:
    """Writes one file; returns its size in bytes."""
    data = to_bytes(indices, codebook_size, fingerprint)
    with atomic_write(path, "wb") as file:
        file.write(data)
    return len(data)
