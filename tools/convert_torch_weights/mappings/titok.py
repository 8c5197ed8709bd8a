"""TiTok: its weights are recognised, there is no table yet."""

from tools.convert_torch_weights.mappings.network import Findings, Network, Row, columns, rows

_ROWS = (
    Row("num_latent_tokens", "latent_tokens", rows, "rows"),
    Row("codebook_size", "quantize.embedding.weight", rows, "rows"),
    Row("token_size", "quantize.embedding.weight", columns, "columns"),
    Row("vit_enc_patch_size", "encoder.patch_embed.weight", lambda s: s[-1], "width"),
)


def _derive(found: Findings) -> None:
    found.read(_ROWS)


NETWORK = Network("titok", "TiTok", "encoder.latent_token_positional_embedding", derive=_derive)
