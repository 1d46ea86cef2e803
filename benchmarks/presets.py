"""What the microbenchmark runs on, by short names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.workloads import (
    Workload,
    chat_like,
    data_folder,
    fixed,
    forced_length,
    full_vocabulary,
    mixed_rows,
    prompts,
    real_like,
    real_rows,
)


@dataclass(frozen=True)
class Preset:
    """A workload, and what is usually run on it."""

    about: str
    make: Callable[..., Workload]  # draws it on a `device`
    dtype: str | None = None  # bfloat16 on a GPU, float32 on a CPU
    ways: tuple[str, ...] = ()  # by key; none: all that can compute its rows


def real(*, device: str = "cpu") -> Workload:
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError("smollm2_top_p95.npz is not in the folder RL_LOSS_DATA")
    return real_rows(folder)[0]


TINY = {"n": 64, "h": 32, "v": 500}
MICRO = ("ours", "graph", "add-grad", "add-float32", "into")
WIDE = ("ours", "graph", "sparse", "padded")

PRESETS: dict[str, Preset] = {
    "tiny": Preset("64 rows of 16 ids, V 500: shows that it runs", partial(fixed, 16, **TINY)),
    "tiny-full": Preset("64 rows over V 500", partial(full_vocabulary, **TINY)),
    "tiny-mixed": Preset("64 rows of all four kinds, V 500", partial(mixed_rows, **TINY)),
    "real": Preset("SmolLM2-135M's own top-p 0.95 supports, from the folder RL_LOSS_DATA", real),
    "real-like": Preset("2337 rows of such widths, V 49152: for a CPU", real_like),
    "k8": Preset("16384 rows of 8 ids, H 2048, V 151936, as those below", partial(fixed, 8)),
    "k20": Preset("20 ids a row", partial(fixed, 20)),
    "k128": Preset("128 ids a row", partial(fixed, 128)),
    "k512": Preset("512 ids a row", partial(fixed, 512)),
    "chat": Preset("chat-like: mean 6, 46 % of one id, widest 684", chat_like),
    "forced": Preset("forced-length: 16 rows of all V, 16 of 50000, mean 264", forced_length),
    "full": Preset("no supports: every row over the vocabulary", full_vocabulary),
    "full-float16": Preset("the same in float16", full_vocabulary, dtype="float16"),
    "prompts": Preset("the same, three quarters of the rows in prompts", prompts),
    "mixed": Preset("rows of all four kinds by turns", mixed_rows),
    "micro": Preset(
        "a micro-batch after others: 2048 rows of 20 ids", partial(fixed, 20, 2048), ways=MICRO
    ),
    "h5120": Preset("128 ids a row, H 5120 (GLM)", partial(fixed, 128, h=5120), ways=WIDE),
    "h7168": Preset("H 7168 (DeepSeek)", partial(fixed, 128, h=7168), ways=WIDE),
    "h8192": Preset("H 8192 (Llama 70B)", partial(fixed, 128, h=8192), ways=WIDE),
    "gemma": Preset("H 2560, V 262144 (Gemma)", partial(fixed, 128, h=2560, v=262144), ways=WIDE),
}
# Names for several of them.
GROUPS: dict[str, list[str]] = {
    "h200": [key for key in PRESETS if not key.startswith(("tiny", "real"))],
    "shapes": ["h5120", "h7168", "h8192", "gemma"],
}


def usual() -> str:
    """On a GPU its sort of batch; on a CPU the real supports, where they are, or their like."""
    if torch.cuda.is_available():
        return "k20"
    return "real" if data_folder() is not None else "real-like"
