"""Memory a rank of one training step of a small Evoformer on a long protein, on 1, 2 and 4 ranks.

    python benchmarks/memory/fold.py [--residues 512] [--rows 64] [--out FILE]
    python benchmarks/memory/fold.py --ways [--residues 160] [--rows 32] [--depth 8]

Every number is of processes of their own: resident memory at its highest during the step, above what the process held
just before it (after a step at a small size, which loads what is loaded once). The model, its loss and its batch are
the trainer's, every stage recomputed in backward. `openfold3` is the same step on one process with OpenFold3's stack of
blocks in place of ours, of the same sizes, with its chunks and its checkpoints. Writes a table, FILE.json and FILE.svg.
`--ways` compares the values of train.checkpoint_activations on two ranks instead, and writes a table.
"""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsp
import train
from benchmarks.common import ROOT, STYLE, circumstances, line, options, table, text, write_down
from benchmarks.methods.hosts import GIVE_PAGES, Ranks, highest, serve
from benchmarks.methods.rivals import all_ranks
from zoo.data.protein.record import ATOMS, LETTERS, Protein
from zoo.training import config as cfg
from zoo.training.model import compile_and_recompute

RUNS = (("openfold3", 1), ("dsp", 1), ("dsp", 2), ("dsp", 4))
MODEL = {
    "c_m": 32, "c_z": 32, "c_s": 32, "depth": 1, "msa_heads": 2, "msa_head_dim": 16, "pair_heads": 2,
    "pair_head_dim": 16, "triangle": 32, "outer": 8, "transition": 2, "extra_depth": 0, "msa_dropout": 0.0,
    "pair_dropout": 0.0, "chunk": 2**20,
}  # fmt: skip
OPENFOLD_CHUNK = 4  # rows of a pair that its attention takes at once


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


def step(kind: str, residues: int, rows: int, precision: str, way: str, depth: int) -> dict[str, Any]:
    """Forward, backward and update of a fresh model on this rank: what it took. Rank 0 keeps the gradients."""
    dtype = getattr(torch, precision)
    torch.set_default_dtype(dtype)
    shape = [f"data.residues={residues}", f"data.rows={rows}", "data.extra_rows=0", "data.path=/", "dry_run=true"]
    shape.append("objective.recycles=0")  # what further passes take is time: they keep nothing
    overrides = [f"model.overrides.{key}={value}" for key, value in (MODEL | {"depth": depth}).items()]
    shape.append(f"train.checkpoint_activations={way}")
    config = cfg.load([str(ROOT / "configs/protein.yaml"), *shape, *overrides])
    mesh = all_ranks()
    task: Any = cfg.create_task(config, mesh)
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
    found: dict[str, Any] = {}

    def run() -> None:
        batch = task.batch(objective, 1, 0, 0, 1)
        batch = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}
        terms = train.mean_losses(objective(**batch))
        loss = torch.stack(list(terms.values())).sum()
        loss.backward()
        found["loss"] = loss.item()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()

    dist.barrier()
    used = time.process_time()
    with dsp.count_comm() as comm:
        found["bytes"], found["seconds"] = highest(run)
    found["cpu"] = time.process_time() - used
    found["sent"] = sum(sum(phase.bytes.values()) for phase in (comm.forward, comm.backward, comm.recompute))
    if dist.get_rank() == 0:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.save(gradients, found.setdefault("file", os.environ["STORE"].removeprefix("file://") + ".pt"))
    return found


def measure(
    kind: str, ranks: int, residues: int, rows: int, precision: str = "float32", way: str = "stages", depth: int = 1
) -> dict[str, Any]:
    """{"ranks": what every rank took, "gradients": those of rank 0, averaged}, of fresh processes."""
    with Ranks(__file__, ranks, pages=GIVE_PAGES) as processes:
        settings = {"kind": kind, "precision": precision, "way": way, "depth": depth}
        processes.ask("step", residues=24, rows=8, **settings)
        each = processes.ask("step", residues=residues, rows=rows, **settings)
        return {"ranks": each, "gradients": torch.load(each[0]["file"])}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, as a share of the largest number of that gradient.

    Some are zero but for rounding, a bias that a softmax takes no notice of; they are compared with the others.
    """
    assert a.keys() == b.keys()
    least = max(x.abs().max().item() for x in b.values()) / 1000
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=least)).item() for name in a)


def picture(rows: list[dict[str, Any]], title: str) -> str:
    """Bars of MiB a rank, and for more than one rank the share that would be perfect."""
    one = next(row["mib"] for row in rows if row["kind"] == "dsp" and row["ranks"] == 1)
    top, left, height, scale = 46, 176, 30, 350 / max(row["mib"] for row in rows)
    parts = [text(left, 26, title, "", "start")]
    for i, row in enumerate(rows):
        y, long, ours = top + i * (height + 12), row["mib"] * scale, row["kind"] == "dsp"
        name = f"dsp, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" if ours else "OpenFold3, 1 process"
        parts.append(text(left - 10, y + 20, name, "", "end"))
        size = f'x="{left}" y="{y}" width="{long:.1f}" height="{height}" rx="3"'
        parts.append(f'<rect {size} fill="{"#3b82f6" if ours else "#9198a1"}"/>')
        parts.append(text(left + long + 8, y + 20, f"{row['mib']:.0f} MiB", "", "start"))
        if ours and row["ranks"] > 1:
            ideal = left + one / row["ranks"] * scale
            parts.append(f'<path d="M{ideal:.1f} {y - 3}V{y + height + 3}" stroke="#d64541" stroke-width="2"/>')
    bottom = top + len(rows) * (height + 12)
    parts.append(text(left, bottom + 14, "red: the memory of one rank, divided by the ranks", "soft", "start"))
    size = f'viewBox="0 0 620 {bottom + 26}" width="620" height="{bottom + 26}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def compare_ways(residues: int, rows: int, depth: int) -> None:
    """Compare the ways to recompute activations on two ranks."""
    head = "train.checkpoint_activations", "MiB a rank", "MiB sent", "seconds of CPU", "loss", "gradients differ by"
    print("\n".join(table(head, [])))
    kept: dict[str, Tensor] = {}
    for way in ("none", "stages", "blocks", "both"):
        found = measure("dsp", 2, residues, rows, way=way, depth=depth)
        kept = kept or found["gradients"]
        most = {key: max(rank[key] for rank in found["ranks"]) for key in ("bytes", "sent", "cpu")}
        numbers = (f"{most['bytes'] / 2**20:.0f}", f"{most['sent'] / 2**20:.0f}", f"{most['cpu']:.1f}")
        off = furthest(found["gradients"], kept)
        print(line([way, *numbers, f"{found['ranks'][0]['loss']:.6f}", f"{off:.0e}"]), flush=True)


def main(arguments: Sequence[str]) -> int:
    o = options(__doc__, arguments, ways=False, residues=0, rows=0, depth=8, out=None)
    residues, rows = o.residues or (160 if o.ways else 512), o.rows or (32 if o.ways else 64)
    if o.ways:
        compare_ways(residues, rows, o.depth)
        return 0
    runs: list[dict[str, Any]] = []
    alone: dict[str, Any] = {}
    print("\n".join(table(["", "ranks", "MiB a rank", "of one rank's share", "seconds", "loss", "gradients off"], [])))
    for kind, n in RUNS:
        if kind == "openfold3" and find_spec(kind) is None:
            print("openfold3 is not installed: its bar is left out")
            continue
        found = measure(kind, n, residues, rows)
        mib, seconds = (max(rank[key] for rank in found["ranks"]) for key in ("bytes", "seconds"))
        row = {"kind": kind, "ranks": n, "mib": mib / 2**20, "seconds": seconds, "loss": found["ranks"][0]["loss"]}
        if kind == "dsp":
            alone = alone or found | row
            off = furthest(found["gradients"], alone["gradients"])
            row |= {"share": row["mib"] * n / alone["mib"], "off": off} if n > 1 else {}
        runs.append(row)
        print(line([kind, n, f"{row['mib']:.0f}", f"{row.get('share', 1):.2f}", f"{seconds:.0f}",
                    f"{row['loss']:.6f}", f"{row.get('off', 0):.0e}"]), flush=True)  # fmt: skip
    settings = {"residues": residues, "rows": rows, "model": MODEL, "runs": runs}
    title = f"Memory a rank of one training step, {residues} residues"
    write_down("fold-memory", o.out, circumstances(arguments) | settings, picture(runs, title))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"step": step})
    else:
        sys.exit(main(sys.argv[1:]))
