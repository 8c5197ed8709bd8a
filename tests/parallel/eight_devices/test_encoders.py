"""Encoders divide the batch over the devices and give what one device gives."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pid_jax.encoders import build_text_encoder
from pid_jax.encoders.autoencoder import AutoEncoder
from pid_jax.encoders.autoencoder_codec import AutoEncoderCodec, Normalisation
from pid_jax.encoders.weights import random_params, shapes_of

MESH = Mesh(np.array(jax.devices()), ("data",))
TOKENIZER = Path(__file__).parents[2] / "golden/data/encoders/toy_tokenizer"


def test_a_divided_batch_of_pictures():
    network = AutoEncoder(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=2)
    params = random_params(shapes_of(network))
    codec = AutoEncoderCodec("flux", network, lambda: params,
                             normalisation=Normalisation((0.0,), (1.0,)))
    images = np.random.default_rng(0).standard_normal((8, 8, 8, 3)).astype(np.float32)
    batch = NamedSharding(MESH, PartitionSpec("data"))
    whole = NamedSharding(MESH, PartitionSpec())
    encode = jax.jit(lambda params, images: codec.with_params(params).encode(images),
                     in_shardings=(whole, batch), out_shardings=batch)
    program = encode.lower(params, images).compile()
    assert "all-gather" not in program.as_text() and "all-reduce" not in program.as_text()
    np.testing.assert_allclose(encode(params, images), codec.encode(images), atol=1e-5)


def test_captions_are_divided():
    options = {"width": 16, "length": 4, "weights": "random", "instruction": (),
               "tokenizer": str(TOKENIZER), "dtype": "float32"}
    captions = [f"caption {i}" for i in range(11)]
    divided = build_text_encoder("gemma2", **options, batch=8).embed(captions)
    alone = build_text_encoder("gemma2", **options, batch=3).embed(captions)
    assert divided.shape == (11, 4, 16)
    np.testing.assert_allclose(divided, alone, atol=1e-6)
