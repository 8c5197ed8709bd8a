"""PixelDiT written with PyTorch's own parts: what `benchmarks.peer` compares this package with.

    python benchmarks/peer_torch.py WEIGHTS.npz OPTIONS.json THREADS

Stands alone, so that it runs under an interpreter that has torch and numpy only: the network of
the PixelDiT paper (arXiv 2511.20645) from its formulas, with the parameter names of PyTorch
checkpoints. It reads one request a line on stdin and answers each with one line of JSON:

    {"run": "forward", "mode": "eager", "batch": "FILE.npz"}      -> {"seconds": ...}
    {"save": "forward", "mode": "eager", "batch": "FILE.npz", "to": "FILE.npz"} -> {}
    {"trace": "step", "mode": "eager", "batch": "FILE.npz"}      -> {"operations": {name: seconds}}
"""

import json
import math
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

TIME_CHANNELS, TIME_MAX_PERIOD, ROPE_EXTENT, ROPE_THETA = 256, 10.0, 16.0, 10000.0
LEARNING_RATE, CLIP_NORM, EMA_DECAY = 1e-4, 0.1, 0.999


def image_angles(head: int, rows: int, columns: int) -> torch.Tensor:
    """[rows * columns, head / 2]: pairs alternate column, row."""
    frequencies = ROPE_THETA ** (-4 * np.arange(head // 4) / head)
    x = np.linspace(0, ROPE_EXTENT, columns)[:, None] * frequencies
    y = np.linspace(0, ROPE_EXTENT, rows)[:, None] * frequencies
    shape = (rows, columns, head // 4)
    both = np.stack([np.broadcast_to(x, shape), np.broadcast_to(y[:, None], shape)], axis=-1)
    return torch.from_numpy(both.reshape(rows * columns, -1))


def text_angles(head: int, length: int) -> torch.Tensor:
    """[length, head / 2]."""
    frequencies = ROPE_THETA ** (-2 * np.arange(head // 2) / head)
    return torch.from_numpy(np.arange(length)[:, None] * frequencies)


def rotation(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, 1, L, head / 2], float32."""
    return angles.cos().float()[None, None], angles.sin().float()[None, None]


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns neighbouring channels of x [B, H, L, d]."""
    (cos, sin), pairs = table, x.unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def pixel_positions(rows: int, columns: int, channels: int, patch: int) -> torch.Tensor:
    """Sine-cosine embedding of every pixel, [L, patch^2, channels] float32."""
    omega = 10000.0 ** (-np.arange(channels // 4) / (channels / 4))
    table = lambda n: np.concatenate(
        [f(np.arange(n)[:, None] * omega) for f in (np.sin, np.cos)], 1)
    height, width = rows * patch, columns * patch
    shape = (height, width, channels // 2)
    both = np.concatenate([np.broadcast_to(table(width), shape),
                           np.broadcast_to(table(height)[:, None], shape)], axis=-1)
    both = both.reshape(rows, patch, columns, patch, channels).transpose(0, 2, 1, 3, 4)
    return torch.from_numpy(both.reshape(rows * columns, patch**2, channels).astype(np.float32))


class Sides(nn.Module):
    """q, k, v and output projection; `suffix` ends the names of one stream."""

    def __init__(self, width: int, heads: int, suffixes: tuple[str, ...]):
        super().__init__()
        self.heads = heads
        for suffix in suffixes:
            self.add_module(f"qkv{suffix}", nn.Linear(width, 3 * width, bias=False))
            self.add_module(f"q_norm{suffix}", nn.RMSNorm(width // heads, eps=1e-6))
            self.add_module(f"k_norm{suffix}", nn.RMSNorm(width // heads, eps=1e-6))
            self.add_module(f"proj{suffix}", nn.Linear(width, width))

    def project(self, x, suffix, table):
        """[B, L, D] -> q, k, v [B, H, L, d]."""
        q, k, v = getattr(self, f"qkv{suffix}")(x).unflatten(-1, (3, self.heads, -1)).permute(
            2, 0, 3, 1, 4)
        q, k = getattr(self, f"q_norm{suffix}")(q), getattr(self, f"k_norm{suffix}")(k)
        return rotate(q, table), rotate(k, table), v


class JointAttention(Sides):
    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, ("_x", "_y"))

    def forward(self, x, y, image_table, text_table):
        image, text = self.project(x, "_x", image_table), self.project(y, "_y", text_table)
        out = F.scaled_dot_product_attention(
            *(torch.cat(pair, 2) for pair in zip(text, image))).transpose(1, 2).flatten(2)
        length = y.shape[1]
        return self.proj_x(out[:, length:]), self.proj_y(out[:, :length])


class SelfAttention(Sides):
    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, ("",))

    def forward(self, x, table):
        out = F.scaled_dot_product_attention(*self.project(x, "", table))
        return self.proj(out.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        inner = int(2 * (4 * width) / 3)
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def modulate(x, shift, scale):
    return x * (1 + scale) + shift


class PatchBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        for side in "xy":
            self.add_module(f"norm_{side}1", nn.RMSNorm(width, eps=1e-6))
            self.add_module(f"norm_{side}2", nn.RMSNorm(width, eps=1e-6))
            self.add_module(f"mlp_{side}", SwiGlu(width))
        self.attn = JointAttention(width, heads)
        self.adaLN_modulation_img = nn.Sequential(nn.Linear(width, 6 * width))
        self.adaLN_modulation_txt = nn.Sequential(nn.Linear(width, 6 * width))

    def forward(self, x, y, c, image_table, text_table):
        image = self.adaLN_modulation_img(c).chunk(6, -1)
        text = self.adaLN_modulation_txt(c).chunk(6, -1)
        x_out, y_out = self.attn(modulate(self.norm_x1(x), *image[:2]),
                                 modulate(self.norm_y1(y), *text[:2]), image_table, text_table)
        x, y = x + image[2] * x_out, y + text[2] * y_out
        x = x + image[5] * self.mlp_x(modulate(self.norm_x2(x), *image[3:5]))
        return x, y + text[5] * self.mlp_y(modulate(self.norm_y2(y), *text[3:5]))


class PixelMlp(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, z):
        return self.fc2(F.gelu(self.fc1(z)))


class PixelBlock(nn.Module):
    def __init__(self, hidden: int, channels: int, pixels: int, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(channels, eps=1e-6) for _ in range(2))
        self.compress_to_attn = nn.Linear(pixels * channels, width)
        self.attn = SelfAttention(width, heads)
        self.expand_from_attn = nn.Linear(width, pixels * channels)
        self.mlp = PixelMlp(channels)
        self.adaLN_modulation = nn.Sequential(nn.Linear(hidden, 6 * channels * pixels))

    def forward(self, z, condition, table):
        """z [B, L, P, C], condition [B, L, D]."""
        mods = self.adaLN_modulation(condition).unflatten(-1, (z.shape[2], -1)).chunk(6, -1)
        token = self.compress_to_attn(modulate(self.norm1(z), *mods[:2]).flatten(2))
        z = z + mods[2] * self.expand_from_attn(self.attn(token, table)).view_as(z)
        return z + mods[5] * self.mlp(modulate(self.norm2(z), *mods[3:5]))


class Embedder(nn.Module):
    def __init__(self, n_in: int, n_out: int, norm: bool = False):
        super().__init__()
        self.proj = nn.Linear(n_in, n_out)
        self.norm = nn.RMSNorm(n_out, eps=1e-6) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.proj(x))


class TimeEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_CHANNELS, width), nn.SiLU(),
                                 nn.Linear(width, width))
        index = torch.arange(TIME_CHANNELS // 2, dtype=torch.float32)
        table = torch.exp(-math.log(TIME_MAX_PERIOD) * index / (TIME_CHANNELS // 2))
        self.register_buffer("frequencies", table, persistent=False)

    def forward(self, t):
        angles = t[:, None] * self.frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1))


class FinalLayer(nn.Module):
    def __init__(self, channels: int, colours: int):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(channels, eps=1e-6), nn.Linear(channels, colours)

    def forward(self, z):
        return self.linear(self.norm(z))


class PixelDiT(nn.Module):
    """Text-to-image PixelDiT with positions of mode "original"; options as in this package."""

    def __init__(self, hidden_size, num_groups, patch_depth, pixel_depth, patch_size,
                 pixel_hidden_size, pixel_attn_hidden_size, pixel_num_groups, txt_embed_dim,
                 txt_max_length):
        super().__init__()
        pixels = patch_size**2
        self.heads = hidden_size // num_groups, pixel_attn_hidden_size // pixel_num_groups
        self.patch, self.text_length = patch_size, txt_max_length
        self.t_embedder = TimeEmbedder(hidden_size)
        self.s_embedder = Embedder(3 * pixels, hidden_size)
        self.y_embedder = Embedder(txt_embed_dim, hidden_size, norm=True)
        self.y_pos_embedding = nn.Parameter(torch.zeros(1, txt_max_length, hidden_size))
        self.patch_blocks = nn.ModuleList(
            PatchBlock(hidden_size, num_groups) for _ in range(patch_depth))
        self.pixel_embedder = Embedder(3, pixel_hidden_size)
        self.pixel_blocks = nn.ModuleList(
            PixelBlock(hidden_size, pixel_hidden_size, pixels, pixel_attn_hidden_size,
                       pixel_num_groups) for _ in range(pixel_depth))
        self.final_layer = FinalLayer(pixel_hidden_size, 3)
        self.tables = {}

    def positions(self, rows: int, columns: int, text: int):
        """Rotary tables of both paths and of the text, and the pixels' embedding; made once."""
        if (rows, columns, text) not in self.tables:
            channels = self.pixel_embedder.proj.out_features
            self.tables[rows, columns, text] = (
                rotation(image_angles(self.heads[0], rows, columns)),
                rotation(text_angles(self.heads[0], text)),
                rotation(image_angles(self.heads[1], rows, columns)),
                pixel_positions(rows, columns, channels, self.patch))
        return self.tables[rows, columns, text]

    def forward(self, x, t, y, positions):
        """x [B, 3, H, W], t [B] in 0..1000, y [B, T, E]; `positions` of `self.positions`."""
        image_table, text_table, pixel_table, pixels = positions
        size = x.shape[2:]
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        time_vector = self.t_embedder(t)[:, None]
        condition = F.silu(time_vector)
        y = y[:, :self.text_length]
        s, y = self.s_embedder(patches), self.y_embedder(y) + self.y_pos_embedding[:, :y.shape[1]]
        for block in self.patch_blocks:
            s, y = block(s, y, condition, image_table, text_table)
        s = F.silu(time_vector + s)
        z = self.pixel_embedder(patches.unflatten(-1, (3, -1)).transpose(2, 3)) + pixels
        for block in self.pixel_blocks:
            z = block(z, s, pixel_table)
        out = self.final_layer(z).transpose(2, 3).flatten(2).transpose(1, 2)
        return F.fold(out, size, self.patch, stride=self.patch)


class Bench:
    """The three things that are timed, with one network."""

    def __init__(self, net: PixelDiT, compiled: bool):
        self.net, self.mean = net, {name: p.detach().clone() for name, p in net.named_parameters()}
        self.call = torch.compile(net) if compiled else net
        self.optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.0,
                                           fused=True)

    def forward(self, batch):
        with torch.no_grad():
            return self.output(batch, batch["x"], batch["t"])

    def output(self, batch, x, t):
        rows, columns = (side // self.net.patch for side in x.shape[2:])
        length = min(batch["y"].shape[1], self.net.text_length)
        return self.call(x, t, batch["y"], self.net.positions(rows, columns, length))

    def sampler(self, batch):
        """x' = a x + b net(x, 1000 t), row by row of `table` [N, 3]."""
        x = batch["x"]
        with torch.no_grad():
            for t, a, b in batch["table"].tolist():
                x = a * x + b * self.output(batch, x, torch.full((len(x),), 1000 * t))
        return x

    def gradients(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        F.mse_loss(self.output(batch, batch["x"], batch["t"]), batch["target"]).backward()
        return {name: p.grad for name, p in self.net.named_parameters()}

    def step(self, batch):
        """Loss, gradients, clipping, AdamW, exponential moving average."""
        self.gradients(batch)
        parameters = [p for p in self.net.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.values()), list(self.net.parameters()),
                                 1 - EMA_DECAY)

    def matmul(self, batch):
        """A square product, for the machine's own peak."""
        return batch["a"] @ batch["b"]


def trace(function, batch) -> dict[str, float]:
    """Seconds by operation of one call, each without the operations that it calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function(batch)
    return {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}


def load(file: str) -> dict[str, torch.Tensor]:
    """The arrays of an .npz file."""
    with np.load(file) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def answer(request: dict[str, str], bench: Bench, batch: dict[str, torch.Tensor]) -> dict:
    """Does what one request asks."""
    if "trace" in request:
        return {"operations": trace(getattr(bench, request["trace"]), batch)}
    start = time.perf_counter()
    result = getattr(bench, request.get("run") or request["save"])(batch)
    found = {"seconds": time.perf_counter() - start}
    if "save" in request:
        result = result if isinstance(result, dict) else {"result": result}
        np.savez(request["to"], **{name: value.numpy() for name, value in result.items()
                                   if value is not None})
    return found


def main(weights: str, options: str, threads: str) -> None:
    """Answers requests until stdin ends."""
    torch.set_num_threads(int(threads))
    with open(options, encoding="utf-8") as file:
        options = json.load(file)
    benches, batches = {}, {}
    for line in sys.stdin:
        request = json.loads(line)
        mode, batch = request["mode"], batches.setdefault(request["batch"], load(request["batch"]))
        if mode not in benches:
            net = PixelDiT(**options)
            net.load_state_dict(load(weights))
            benches[mode] = Bench(net, mode == "compile")
        print(json.dumps(answer(request, benches[mode], batch)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
