"""Memory a rank: of training steps by method, of a step on a long protein, and of decoding a clip.

    python benchmarks/memory.py                                  # by method, on 1, 2 and 4 ranks; results/memory.json
    python benchmarks/memory.py --budget 64 --ranks 1 2 --methods dsp megatron_lm --out FILE
    python benchmarks/memory.py --fold [--residues 512] [--rows 64]           # a protein; results/fold-memory.json
    python benchmarks/memory.py --ways [--residues 160] [--rows 32] [--blocks 8]         # its recomputation; a table
    python benchmarks/memory.py --decoding [--budget 8]    # GB; by Wan's autoencoder; results/decoding.json

by method   Measured is resident memory at its highest during forward and backward, above what the process held just
            before, plus the weights that the rank has; optimizer states, which depend on weights alone, are not in it.
            Freed memory goes back to the system at once. `peak` is one shape on all numbers of ranks, with nothing
            recomputed and with every stage, against the memory of one rank divided by their number. `longest` (frames)
            and `batch` (samples) are the most that stay within the budget (MiB a rank), found by doubling and bisection
            of measured peaks, as in the two figures of Ring Self-Attention (Li et al., arXiv 2105.13120): there against
            tensor parallelism, with attention that keeps its matrix, which none here does. `--limit`: the most frames
            that are tried.
--fold      One training step of a small Evoformer, the trainer's model, loss and batch, every stage recomputed. Every
            number is of processes of their own, after a step at a small size, which loads what is loaded once.
            `openfold3` is the same step on one process with OpenFold3's stack of blocks in place of ours, of the same
            sizes, with its chunks and its checkpoints. --ways: the values of train.checkpoint_activations on two ranks.
--decoding  The decoder of Wan 2.1 in float32, without gradients, its frame caches included. A rank runs its part of the
            program by itself, on tensors that have a shape and no data, through collectives that answer at once, and
            every tensor is counted from where it is made to where it goes: the weights, what convolutions get of their
            neighbours, the pixels. So the clip, 16:9, may be larger than this machine: it is the largest of one process
            in the budget. What a kernel takes for itself while it runs is not in it, nor what an allocator keeps.
            Frames beyond the third latent one take no more but for their pixels.
"""

import os
import sys
import time
import warnings
import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dsp
import train
from benchmarks.common import ROOT, circumstances, line, options, table, write_down
from benchmarks.hosts import GIVE_PAGES, Ranks, highest, script, stoppable
from benchmarks.methods import METHODS, Shape, Step, all_ranks
from zoo.data.protein.record import ATOMS, LETTERS, Protein
from zoo.training import config as cfg
from zoo.training.model import compile_and_recompute
from zoo.training.shared_codec import shared_codec
from zoo.training.task_lookup import create_task
from zoo.video.codec import Autoencoder

FINE = 16  # bisection ends within a sixteenth
HEAD = "method", "ranks", "MiB a rank", "stages recomputed"
RUNS = (("openfold3", 1), ("dsp", 1), ("dsp", 2), ("dsp", 4))  # of a protein
MODEL = {
    "c_m": 32, "c_z": 32, "c_s": 32, "depth": 1, "msa_heads": 2, "msa_head_dim": 16, "pair_heads": 2,
    "pair_head_dim": 16, "triangle": 32, "outer": 8, "transition": 2, "extra_depth": 0, "msa_dropout": 0.0,
    "pair_dropout": 0.0, "chunk": 2**20,
}  # fmt: skip
OPENFOLD_CHUNK = 4  # rows of a pair that its attention takes at once
FRAMES = 3  # latent ones, of a clip that is decoded
GB = 10**9


# ----------------------------------------------------------------------------------------------------------- by method


def peak(method: str, shape: dict[str, int], recompute: str) -> int:
    """Bytes of a step on this rank: its weights, and what forward and backward took at most."""
    step = Step(method, Shape(**shape), recompute)
    dist.barrier()
    return highest(lambda: step.backward(step.forward()))[0] + step.weights[0]


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest count that fits, to a part in FINE: doubled until one does not, then bisected. 0 if 1 does not."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while low and high - low > max(1, low // FINE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_peak(ranks: Ranks, method: str, shape: Shape, recompute: str = "no") -> int:
    return max(ranks.ask("peak", method=method, shape=vars(shape), recompute=recompute))


def of_method(ranks: Ranks, method: str, shape: Shape, budget: int, unit: int, limit: int) -> dict[str, Any]:
    """One row. `longest` is in frames, of which `unit` are added at a time so that they divide over all ranks."""
    measure = partial(largest_peak, ranks, method)
    for recompute in ("no", "again"):  # load what is loaded once, and make connections
        measure(replace(shape, frames=2 * ranks.size, side=4), recompute)
    short = replace(shape, frames=unit)
    return {
        "method": method, "ranks": ranks.size, "peak": measure(shape), "recomputed": measure(shape, "again"),
        "longest": unit * most(lambda k: measure(replace(shape, frames=k * unit)) <= budget, limit // unit),
        "batch": most(lambda k: measure(replace(short, batch=k)) <= budget, limit // unit),
    }  # fmt: skip


def cells(row: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """A row of the table; in brackets beside that of one rank: N times the memory, and as many times as long."""
    memory = (f"{row[key] / 2**20:.0f} ({row[key] * row['ranks'] / one[key]:.2f})" for key in ("peak", "recomputed"))
    counts = (f"{row[key]} ({row[key] / max(one[key], 1):.1f}×)" for key in ("longest", "batch"))
    return [METHODS[row["method"]] if row["ranks"] > 1 else "one rank", str(row["ranks"]), *memory, *counts]


def by_method(o: Namespace, arguments: Sequence[str]) -> None:
    """Every method on every number of ranks."""
    if 1 not in o.ranks:
        raise SystemExit("--ranks: all is compared with 1, so it has to be among them")
    if not Path("/proc/self/clear_refs").exists():
        print("skipped: resident memory is read from /proc, which only Linux has")
        return
    shape = Shape(o.hidden, max(8, *o.ranks), o.depth, 1, o.frames, o.side)
    budget, unit = int((o.budget or 128.0) * 2**20), max(o.ranks)
    rows: list[dict[str, Any]] = []
    print("\n".join(table([*HEAD, "longest, frames", "batch"])))
    with stoppable():
        for n in sorted(o.ranks):
            with Ranks(__file__, n, pages=GIVE_PAGES) as ranks:
                for method in o.methods if n > 1 else ["dsp"]:  # one rank alone has no method
                    rows.append(of_method(ranks, method, shape, budget, unit, o.limit))
                    print(line(cells(rows[-1], rows[0])), flush=True)
    report = circumstances(arguments) | {"shape": asdict(shape), "budget": budget, "methods": o.methods, "rows": rows}
    write_down("memory", o.out, report)


# ------------------------------------------------------------------------------------------------------ a long protein


class OneProtein:
    """A random walk of so many residues, with a random alignment."""

    def __init__(self, residues: int, rows: int):
        random = torch.Generator().manual_seed(0)
        steps = torch.randn(residues, 1, 3, generator=random)
        positions = (3.8 * steps / steps.norm(dim=-1, keepdim=True)).cumsum(0).expand(-1, len(ATOMS), -1)
        msa = torch.randint(20, (rows, residues), generator=random, dtype=torch.uint8)
        every = torch.arange(residues)
        self.only = Protein(
            name="walk", sequence="".join(LETTERS[i] for i in msa[0]), chains=("A",),
            asym_id=(every * 0).numpy(), entity_id=(every * 0).numpy(), residue_index=every.numpy(),
            residue_ids=tuple(map(str, range(residues))), positions=positions.numpy(),
            resolved=torch.ones(residues, len(ATOMS), dtype=torch.bool).numpy(), msa=msa.numpy(),
            deletions=torch.zeros(msa.shape, dtype=torch.uint16).numpy(), paired=torch.ones(rows).bool().numpy(),
        )  # fmt: skip

    def __len__(self) -> int:
        return 1

    def protein(self, index: int) -> Protein:
        return self.only


class OpenFold(nn.Module):
    """OpenFold3's stack as one of our blocks."""

    def __init__(self, config: Any):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that a CPU has not
            from openfold3.core.model.latent.evoformer import EvoformerStack
        self.stack = EvoformerStack(
            c_m=config.c_m, c_z=config.c_z, c_s=config.c_s, c_hidden_msa_att=config.msa_head_dim,
            c_hidden_opm=config.outer, c_hidden_mul=config.triangle, c_hidden_pair_att=config.pair_head_dim,
            no_heads_msa=config.msa_heads, no_heads_pair=config.pair_heads, no_blocks=config.depth,
            transition_type="relu", transition_n=config.transition, msa_dropout=0.0, pair_dropout=0.0,
            no_column_attention=False, opm_first=False, fuse_projection_weights=False, blocks_per_ckpt=1, inf=1e9,
            eps=1e-8, use_reentrant=False,
        )  # fmt: skip

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            m, z, _ = self.stack(m, z, msa_mask.to(m), pair_mask.to(z), chunk_size=OPENFOLD_CHUNK)
        return m, z


def fold_step(kind: str, residues: int, rows: int, precision: str, way: str, depth: int) -> dict[str, Any]:
    """Forward, backward and update of a fresh model on this rank: what it took. Rank 0 keeps the gradients."""
    dtype = getattr(torch, precision)
    torch.set_default_dtype(dtype)
    shape = [f"data.residues={residues}", f"data.rows={rows}", "data.extra_rows=0", "data.path=/", "dry_run=true"]
    shape.append("objective.recycles=0")  # what further passes take is time: they keep nothing
    overrides = [f"model.overrides.{key}={value}" for key, value in (MODEL | {"depth": depth}).items()]
    shape.append(f"train.checkpoint_activations={way}")
    config = cfg.load([str(ROOT / "configs/protein.yaml"), *shape, *overrides])
    mesh = all_ranks()
    task: Any = create_task(config, mesh)
    task.train = OneProtein(residues, rows)
    model = task.model()
    torch.manual_seed(0)
    for _, p in sorted(model.named_parameters()):
        if p.ndim > 1:  # nothing starts as zero, which would hide every error
            nn.init.normal_(p, std=0.5 / p.shape[-1] ** 0.5)
    if kind == "openfold3":
        model.blocks = nn.ModuleList([OpenFold(model.config)])
    objective = task.objective(model)
    if kind == "dsp":
        compile_and_recompute(config, model)
        dsp.parallelize(objective, mesh, gather_output=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    figures: dict[str, Any] = {}

    def run() -> None:
        batch = task.batch(objective, 1, 0, 0, 1)
        batch = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}
        terms = train.mean_losses(objective(**batch))
        loss = torch.stack(list(terms.values())).sum()
        loss.backward()
        figures["loss"] = loss.item()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()

    dist.barrier()
    used = time.process_time()
    with dsp.count_comm() as comm:
        figures["bytes"], figures["seconds"] = highest(run)
    figures["cpu"] = time.process_time() - used
    figures["sent"] = sum(sum(phase.bytes.values()) for phase in (comm.forward, comm.backward, comm.recompute))
    if dist.get_rank() == 0:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.save(gradients, figures.setdefault("file", os.environ["STORE"].removeprefix("file://") + ".pt"))
    return figures


def measure(
    kind: str, ranks: int, residues: int, rows: int, precision: str = "float32", way: str = "stages", depth: int = 1
) -> dict[str, Any]:
    """{"ranks": what every rank took, "gradients": those of rank 0, averaged}, of fresh processes."""
    with Ranks(__file__, ranks, pages=GIVE_PAGES) as processes:
        settings = {"kind": kind, "precision": precision, "way": way, "depth": depth}
        processes.ask("fold_step", residues=24, rows=8, **settings)
        each = processes.ask("fold_step", residues=residues, rows=rows, **settings)
        return {"ranks": each, "gradients": torch.load(each[0]["file"])}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, as a share of the largest number of that gradient.

    Some are zero but for rounding, a bias that a softmax takes no notice of; they are compared with the others.
    """
    assert a.keys() == b.keys()
    least = max(x.abs().max().item() for x in b.values()) / 1000
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=least)).item() for name in a)


def compare_ways(residues: int, rows: int, depth: int) -> None:
    """Compare the ways to recompute activations on two ranks."""
    head = "train.checkpoint_activations", "MiB a rank", "MiB sent", "seconds of CPU", "loss", "gradients differ by"
    print("\n".join(table(head)))
    kept: dict[str, Tensor] = {}
    for way in ("none", "stages", "blocks", "both"):
        outcome = measure("dsp", 2, residues, rows, way=way, depth=depth)
        kept = kept or outcome["gradients"]
        most = {key: max(rank[key] for rank in outcome["ranks"]) for key in ("bytes", "sent", "cpu")}
        numbers = (f"{most['bytes'] / 2**20:.0f}", f"{most['sent'] / 2**20:.0f}", f"{most['cpu']:.1f}")
        off = furthest(outcome["gradients"], kept)
        print(line([way, *numbers, f"{outcome['ranks'][0]['loss']:.6f}", f"{off:.0e}"]), flush=True)


def fold(residues: int, rows: int) -> dict[str, Any]:
    """The step on 1, 2 and 4 ranks, and with OpenFold3's blocks."""
    runs: list[dict[str, Any]] = []
    alone: dict[str, Any] = {}
    print("\n".join(table(["", "ranks", "MiB a rank", "of one rank's share", "seconds", "loss", "gradients off"])))
    for kind, n in RUNS:
        if kind == "openfold3" and find_spec(kind) is None:
            print("openfold3 is not installed: its bar is left out")
            continue
        outcome = measure(kind, n, residues, rows)
        mib, seconds = (max(rank[key] for rank in outcome["ranks"]) for key in ("bytes", "seconds"))
        row = {"kind": kind, "ranks": n, "mib": mib / 2**20, "seconds": seconds, "loss": outcome["ranks"][0]["loss"]}
        if kind == "dsp":
            alone = alone or outcome | row
            off = furthest(outcome["gradients"], alone["gradients"])
            row |= {"share": row["mib"] * n / alone["mib"], "off": off} if n > 1 else {}
        runs.append(row)
        print(line([kind, n, f"{row['mib']:.0f}", f"{row.get('share', 1):.2f}", f"{seconds:.0f}",
                    f"{row['loss']:.6f}", f"{row.get('off', 0):.0e}"]), flush=True)  # fmt: skip
    return {"residues": residues, "rows": rows, "model": MODEL, "runs": runs}


# ------------------------------------------------------------------------------------------------------ decoding a clip


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


def decoding_peak(codec: Autoencoder, height: int, width: int) -> int:
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
        return decoding_peak(shared_codec(codec), *size)
    finally:
        dist.destroy_process_group()


def decoding(budget: float, sizes: Sequence[int]) -> dict[str, Any]:
    """The largest clip of one process in so many GB, on each number of ranks."""
    codec = decoder()
    weights = sum(p.numel() * p.element_size() for p in codec.module.parameters())
    side = most(lambda k: decoding_peak(codec, 9 * k, 16 * k) <= budget * GB, 2**16)
    size = 9 * side, 16 * side
    peaks: dict[int, list[int]] = {}
    for n in sizes:
        ends = [0] if n == 1 else [0, n // 2, n - 1]  # inner ranks have two neighbours
        peaks[n] = [
            decoding_peak(codec, *size) if n == 1 else rank_of(codec, n, rank, size) for rank in dict.fromkeys(ends)
        ]
        print(f"{n} ranks: {max(peaks[n]) / GB:.2f} GB, of which weights {weights / GB:.2f}", flush=True)
    rows, columns = (8 * n for n in size)
    return {"rows": rows, "columns": columns, "frames": 1 + 4 * (FRAMES - 1), "weights": weights, "peak": peaks}


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, {"methods": METHODS}, fold=False, ways=False, decoding=False, ranks=[1, 2, 4],
        methods=list(METHODS), budget=0.0, hidden=64, depth=2, frames=64, side=8, limit=1024, residues=0, rows=0,
        blocks=8, out=None,
    )  # fmt: skip
    if o.ways:
        compare_ways(o.residues or 160, o.rows or 32, o.blocks)
    elif o.fold:
        write_down("fold-memory", o.out, circumstances(arguments) | fold(o.residues or 512, o.rows or 64))
    elif o.decoding:
        write_down("decoding", o.out, circumstances(arguments) | decoding(o.budget or 8.0, o.ranks))
    else:
        by_method(o, arguments)
    return 0


if __name__ == "__main__":
    script(main, peak=peak, fold_step=fold_step)
