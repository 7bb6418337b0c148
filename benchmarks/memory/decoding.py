"""Peak memory a rank of decoding a clip by AutoencoderKLWan, by the number of ranks: docs/images/decoding.svg.

    python benchmarks/memory/decoding.py           # the largest clip of one process in 8 GB, on 1, 2 and 4 ranks
    python benchmarks/memory/decoding.py --budget 2 --ranks 1 8 --out FILE

The decoder is that of Wan 2.1, in float32, without gradients, its frame caches included. A rank runs its part of the
program by itself, on tensors that have a shape and no data, through collectives that answer at once, and every tensor
is counted from where it is made to where it goes: the weights, what convolutions get of their neighbours, the pixels.
So the clip may be larger than this machine. What is counted is what the program holds; what a kernel takes for itself
while it runs is not in it, nor what an allocator keeps. A clip is 16:9:
frames beyond the third latent one take no more but for their pixels.
"""

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Panel, Series, circumstances, figure, options, write_down
from benchmarks.memory.by_method import most
from zoo.training.together import together
from zoo.video.codec import Autoencoder

FRAMES = 3  # latent ones
GB = 10**9


class Live(TorchDispatchMode):
    """Bytes of all tensors that live, and the most so far: of the memory behind them, which views share."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: set[int] = set()

    def add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes += nbytes
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.gone, key, nbytes)

    def gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.bytes -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        pytree.tree_map_only(Tensor, self.add, out)
        return out


def decoder() -> Autoencoder:
    """That of Wan 2.1, without its encoder."""
    import diffusers

    with torch.device("meta"):
        module = diffusers.AutoencoderKLWan().eval().requires_grad_(False)
    module.encoder = None
    return Autoencoder(module, Path(), [])


def peak(codec: Autoencoder, height: int, width: int) -> int:
    """Bytes that a rank holds at most while it decodes a clip of so many latent rows and columns."""
    z = torch.empty(1, codec.channels, FRAMES, height, width, device="meta")
    with torch.no_grad():
        codec.decoding(z)  # which plans it
        with Live() as live:
            for p in codec.module.parameters():
                live.add(p)
            live.add(z)
            codec.decoding(z)
    return live.peak


def rank_of(codec: Autoencoder, n: int, rank: int, size: tuple[int, int]) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        return peak(together(codec), *size)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    o = options(__doc__, arguments, budget=8.0, ranks=[1, 2, 4], out=None)
    codec = decoder()
    weights = sum(p.numel() * p.element_size() for p in codec.module.parameters())
    side = most(lambda k: peak(codec, 9 * k, 16 * k) <= o.budget * GB, 2**16)
    size = 9 * side, 16 * side
    found: dict[int, list[int]] = {}
    for n in o.ranks:
        ends = [0] if n == 1 else [0, n // 2, n - 1]  # inner ranks have two neighbours
        found[n] = [peak(codec, *size) if n == 1 else rank_of(codec, n, rank, size) for rank in dict.fromkeys(ends)]
        print(f"{n} ranks: {max(found[n]) / GB:.2f} GB, of which weights {weights / GB:.2f}", flush=True)
    rows, columns = (8 * n for n in size)
    most_held = {n: max(each) for n, each in found.items()}
    ideal = [weights + (most_held[o.ranks[0]] - weights) / n for n in o.ranks]
    data = {"rows": rows, "columns": columns, "frames": 1 + 4 * (FRAMES - 1), "weights": weights, "peak": found}
    series = [
        Series("a rank holds", "#1f77b4", [(i, most_held[n] / GB) for i, n in enumerate(o.ranks)]),
        Series("weights, and 1/N of the rest", "#999999", [(i, nbytes / GB) for i, nbytes in enumerate(ideal)]),
    ]
    title = f"AutoencoderKLWan, {rows} x {columns} pixels"
    panel = Panel(title, list(map(str, o.ranks)), series, "ranks", unit="GB")
    note = f"float32, decoding without gradients or tiles; weights {weights / GB:.2f} GB"
    write_down("decoding", o.out, circumstances(arguments) | data, figure("Peak memory of decoding", [panel], note))


if __name__ == "__main__":
    main(sys.argv[1:])
