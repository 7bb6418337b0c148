"""Memory a rank of one training step of a small Evoformer on a long protein, on 1, 2 and 4 ranks.

    python benchmarks/memory/fold.py [--residues 512] [--rows 64] [--out FILE]
    python benchmarks/memory/fold.py --ways [--residues 160] [--rows 32] [--depth 8]

Every number is of processes of their own: resident memory at its highest during the step, above what the process held
just before it (after a step at a small size, which loads what is loaded once). The model, its loss and its batch are
the trainer's, every stage recomputed in backward. `openfold3` is the same step on one process with OpenFold3's stack of
blocks in place of ours, of the same sizes, with its chunks and its checkpoints. Writes a table, FILE.json and FILE.svg.
`--ways` compares the values of train.checkpoint_activations on two ranks instead, and writes a table.
"""

# ruff: noqa: E402 (the repository is put on the path first)
import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsp
import train
from benchmarks.common import write_down
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


def resident(field: str = "VmRSS") -> int:
    """Bytes; VmHWM is the highest since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def one_step(
    kind: str, residues: int, rows: int, dtype: torch.dtype, report: Path | None, way: str, depth: int
) -> None:
    """Forward, backward and update of a fresh model on this rank; what it took goes to `report`."""
    torch.set_default_dtype(dtype)
    shape = [f"data.residues={residues}", f"data.rows={rows}", "data.extra_rows=0", "data.path=/", "dry_run=true"]
    shape.append("objective.recycles=0")  # what further passes take is time: they keep nothing
    overrides = [f"model.overrides.{key}={value}" for key, value in (MODEL | {"depth": depth}).items()]
    shape.append(f"train.checkpoint_activations={way}")
    config = cfg.load([str(ROOT / "configs/protein.yaml"), *shape, *overrides])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))["sp"]
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
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, began, used = resident(), time.perf_counter(), time.process_time()
    batch = task.batch(objective, 1, 0, 0, 1)
    batch = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}
    with dsp.count_comm() as comm:
        terms = train.mean_losses(objective(**batch))
        loss = torch.stack(list(terms.values())).sum()
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    optimizer.step()
    took = {
        "bytes": resident("VmHWM") - before, "seconds": time.perf_counter() - began, "loss": loss.item(),
        "cpu": time.process_time() - used,
        "sent": sum(sum(phase.bytes.values()) for phase in (comm.forward, comm.backward, comm.recompute)),
    }  # fmt: skip
    if report:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, took)
        if dist.get_rank() == 0:
            torch.save({"ranks": gathered, "gradients": gradients}, report)


def worker(kind: str, residues: int, rows: int, dtype: str, report: str, way: str, depth: int) -> None:
    dist.init_process_group("gloo")
    one_step(kind, 24, 8, getattr(torch, dtype), None, way, depth)
    one_step(kind, residues, rows, getattr(torch, dtype), Path(report), way, depth)
    dist.destroy_process_group()


def measure(
    kind: str, ranks: int, residues: int, rows: int, dtype: str = "float32", way: str = "stages", depth: int = 1
) -> dict[str, Any]:
    """{"ranks": what every rank took, "gradients": those of rank 0, averaged}, of fresh processes."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as directory:
        probe.bind(("127.0.0.1", 0))
        port, report = probe.getsockname()[1], str(Path(directory) / "report.pt")
        probe.close()
        processes = []
        for rank in range(ranks):
            # freed memory goes back to the system at once, so that what is resident is what is held
            environment = os.environ | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144",
            }  # fmt: skip
            command = [sys.executable, __file__, "worker", kind, str(residues), str(rows), dtype, report]
            command += [way, str(depth)]
            processes.append(subprocess.Popen(command, env=environment))
        if any(process.wait() for process in processes):
            raise SystemExit(f"{kind} on {ranks} ranks failed")
        return torch.load(report)


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
    parts = []
    for i, row in enumerate(rows):
        y = top + i * (height + 12)
        name = (
            "OpenFold3, 1 process"
            if row["kind"] == "openfold3"
            else f"dsp, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        )
        fill = "#9198a1" if row["kind"] == "openfold3" else "#3b82f6"
        parts.append(f'<text x="{left - 10}" y="{y + 20}" text-anchor="end">{name}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{row["mib"] * scale:.1f}" height="{height}" rx="3" fill="{fill}"/>'
        )
        parts.append(f'<text x="{left + row["mib"] * scale + 8:.1f}" y="{y + 20}">{row["mib"]:.0f} MiB</text>')
        if row["kind"] == "dsp" and row["ranks"] > 1:
            x = left + one / row["ranks"] * scale
            parts.append(f'<path d="M{x:.1f} {y - 3}V{y + height + 3}" class="ideal"/>')
    bottom = top + len(rows) * (height + 12)
    style = (
        'text { font: 13px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328 } '
        ".ideal { stroke: #d64541; stroke-width: 2 } .soft { fill: #59636e } "
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft { fill: #9198a1 } }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 {bottom + 26}" width="620" height="{bottom + 26}">'
        f"<style>{style}</style>"
        f'<text x="{left}" y="26">{title}</text>{"".join(parts)}'
        f'<text x="{left}" y="{bottom + 14}" class="soft">'
        "red: the memory of one rank, divided by the ranks</text></svg>\n"
    )


def compare_ways(residues: int, rows: int, depth: int) -> None:
    """Compare the ways to recompute activations on two ranks."""
    print("| train.checkpoint_activations | MiB a rank | MiB sent | seconds of CPU | loss | gradients differ by |")
    print("|---|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for way in ("none", "stages", "blocks", "both"):
        found[way] = result = measure("dsp", 2, residues, rows, way=way, depth=depth)
        most = {key: max(rank[key] for rank in result["ranks"]) for key in ("bytes", "sent", "cpu")}
        off, loss = furthest(result["gradients"], found["none"]["gradients"]), result["ranks"][0]["loss"]
        held, sent = most["bytes"] / 2**20, most["sent"] / 2**20
        print(f"| {way} | {held:.0f} | {sent:.0f} | {most['cpu']:.1f} | {loss:.6f} | {off:.0e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--residues", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--out", type=Path, help="for OUT.json and OUT.svg")
    options = parser.parse_args()
    options.residues = options.residues or (160 if options.ways else 512)
    options.rows = options.rows or (32 if options.ways else 64)
    if options.ways:
        compare_ways(options.residues, options.rows, options.depth)
        return
    rows, found = [], {}
    print("| | ranks | MiB a rank | of one rank's share | seconds | loss | gradients differ by |")
    print("|---|---|---|---|---|---|---|")
    for kind, ranks in RUNS:
        found[kind, ranks] = result = measure(kind, ranks, options.residues, options.rows)
        mib = max(rank["bytes"] for rank in result["ranks"]) / 2**20
        seconds, loss = max(rank["seconds"] for rank in result["ranks"]), result["ranks"][0]["loss"]
        rows.append({"kind": kind, "ranks": ranks, "mib": mib, "seconds": seconds, "loss": loss})
        share, off = "", ""
        if kind == "dsp" and ranks > 1:
            one = next(row["mib"] for row in rows if row["kind"] == "dsp" and row["ranks"] == 1)
            rows[-1] |= {"share": mib * ranks / one, "off": furthest(result["gradients"], found["dsp", 1]["gradients"])}
            share, off = f"{rows[-1]['share']:.2f}", f"{rows[-1]['off']:.0e}"
        print(f"| {kind} | {ranks} | {mib:.0f} | {share} | {seconds:.0f} | {loss:.6f} | {off} |", flush=True)
    settings = {"residues": options.residues, "rows": options.rows, "torch": torch.__version__, "model": MODEL}
    title = f"Memory a rank of one training step, {options.residues} residues"
    write_down("fold-memory", options.out, {**settings, "runs": rows}, picture(rows, title))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        kind, residues, rows, dtype, report, way, depth = sys.argv[2:]
        worker(kind, int(residues), int(rows), dtype, report, way, int(depth))
    else:
        main()
