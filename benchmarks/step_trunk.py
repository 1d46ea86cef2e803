"""A small trunk of Qwen3's shape, for the benchmark of a step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEADS, KV_HEADS, HEAD = 16, 8, 128


class Block(nn.Module):
    """Grouped attention with normalised queries and keys, and a gated MLP of three times H."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv = nn.Linear(h, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.out = nn.Linear(HEADS * HEAD, h, bias=False)
        self.gate_up, self.down = nn.Linear(h, 6 * h, bias=False), nn.Linear(3 * h, h, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:  # x [B, L, h]
        b, length, _ = x.shape
        sizes = HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD
        parts = self.qkv(self.before(x)).split(sizes, -1)
        q, k, v = (part.view(b, length, -1, HEAD).transpose(1, 2) for part in parts)
        q, k = turned(self.q_norm(q), turn), turned(self.k_norm(k), turn)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, length, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Trunk(nn.Module):
    """Token ids `[B, L]` to hidden states `[B * L, h]`; every block is computed again in the
    backward, as trainers of long sequences do."""

    def __init__(self, v: int, h: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(v, h)
        self.blocks = nn.ModuleList(Block(h) for _ in range(layers))
        self.norm = nn.RMSNorm(h)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        place = torch.arange(tokens.shape[1], device=x.device)[:, None]
        step = 1e6 ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        angle = (place * step).repeat(1, 2)
        turn = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, turn, use_reentrant=False)
        return self.norm(x).flatten(0, 1)
