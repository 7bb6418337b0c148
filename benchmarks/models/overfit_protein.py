"""A small Evoformer and structure module learn one real structure by heart: can what they predict be right at all?

    python benchmarks/models/overfit_protein.py [--steps 800] [--out docs/images/overfit-protein.png]

A stretch of an embedded structure that has more long-range contacts than residues, its sequence alone as alignment;
letters are hidden anew at every step. One process, some minutes on one core. Prints the loss, the precision of the
contacts and how near the predicted backbone is, and draws the map.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import zoo
from benchmarks.common import STYLE, text
from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import draw
from zoo.data.protein.record import Protein
from zoo.protein.metrics import superposed
from zoo.protein.objective import ProteinObjective
from zoo.protein.picture import save_contact_maps
from zoo.protein.prediction import Predictor
from zoo.protein.structure import backbone
from zoo.training.show.protein import Predicted, bonded
from zoo.training.tasks.protein import structure_inputs

ROOT = Path(__file__).resolve().parents[2]
NAME, FIRST, RESIDUES = "3nngA", 64, 80
SHOWN = (
    "loss msa", "loss distogram", "loss fape", "long P@L", "long P@L/5", "lDDT-Cβ", "structure lDDT", "structure RMSD",
    "pLDDT",
)  # fmt: skip
WIDE, HIGH, SCALE = 540, 330, 9.0  # pixels, and of an Å
SURE = [(90, "pLDDT 90", "#0053d6"), (70, "70", "#45b6e0"), (50, "50", "#e0a800"), (0, "less", "#e8693a")]
MODEL = {
    "c_m": 32, "c_z": 32, "c_s": 32, "depth": 2, "msa_heads": 4, "msa_head_dim": 8, "pair_heads": 4,
    "pair_head_dim": 8, "triangle": 32, "outer": 8, "transition": 2, "extra_depth": 0, "msa_dropout": 0.0,
    "pair_dropout": 0.0, "structure": 4, "structure_heads": 4, "structure_dropout": 0.0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/overfit-protein.png")
    options = parser.parse_args()
    data = EmbeddedProteins("train")
    whole = next(data.protein(i) for i in range(len(data)) if data.protein(i).name == NAME)
    protein = whole.take(np.arange(FIRST, FIRST + RESIDUES))

    torch.manual_seed(0)
    model = zoo.create("evoformer", **MODEL)
    objective, predictor = ProteinObjective(model), Predictor(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps, pct_start=0.1)
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        example = draw(protein, "overfit", step, residues=RESIDUES, rows=1)
        inputs = example.alignment() | example.single() | example.pairs() | structure_inputs(example)
        terms = objective(**{name: value[None] for name, value in inputs.items()})
        losses = {name: (loss * weight).sum() / weight.sum() for name, (loss, weight) in terms.items()}
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == options.steps:
            shown = draw(protein, "overfit", 0, residues=RESIDUES, rows=1, share=0)
            inputs = {name: value[None] for name, value in (shown.alignment() | shown.single()).items()}
            given = {name: inputs[name] for name in ("msa", "deletions", "sequence", "residue_index", "asym_id")}
            with torch.no_grad():
                found = predictor(**given)
            predicted = Predicted(protein, found.probability[0], found.distance[0])
            predicted.atoms = backbone(found.rotation[0], found.translation[0], bonded(protein))
            predicted.plddt = found.plddt[0]
            measured = predicted.measure()
            numbers = {f"loss {name}": loss.item() for name, loss in losses.items()} | measured
            words = ", ".join(f"{name} {numbers[name]:.3f}" for name in SHOWN)
            print(f"step {step}: {words}; {time.perf_counter() - began:.0f} s", flush=True)
    save_contact_maps(options.out, [predicted.map(measured)])
    options.out.with_name("overfit-structure.svg").write_text(drawn(predicted, protein))


def drawn(predicted: Predicted, protein: Protein) -> str:
    """The predicted trace of Cα atoms on the true one, seen from where it is widest."""
    true, seen = map(torch.from_numpy, protein.atoms("CA"))
    assert predicted.atoms is not None
    assert predicted.plddt is not None
    made, middle = superposed(predicted.atoms[:, 1], true, seen), true[seen].mean(0)
    axes = torch.linalg.svd(true[seen] - middle, full_matrices=False).Vh[:2].T
    places = [(p - middle) @ axes * SCALE + torch.tensor([WIDE / 2, HIGH / 2]) for p in (true, made)]
    ribbon = " ".join(f"{x:.1f},{y:.1f}" for x, y in places[0][seen].tolist())
    lines = [f'<polyline points="{ribbon}" class="true"/>']
    spots = places[1].tolist()
    for (x, y), (u, v), sure in zip(spots, spots[1:], predicted.plddt.tolist()):
        colour = next(colour for least, _, colour in SURE if sure >= least)
        lines.append(f'<path d="M{x:.1f},{y:.1f} L{u:.1f},{v:.1f}" class="made" stroke="{colour}"/>')
    for k, (_, words, colour) in enumerate([*SURE, (0, "true", "#9198a1")]):
        x, y = 24 + 100 * k, HIGH - 12
        lines.append(f'<rect x="{x}" y="{y - 10}" width="18" height="8" fill="{colour}"/>')
        lines.append(text(x + 24, y - 2, words, anchor="start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}"><style>'
        f"{STYLE} .true {{ fill: none; stroke: #9198a1; stroke-opacity: 0.5; stroke-width: 9; stroke-linejoin: round }}"
        f" .made {{ stroke-width: 3; stroke-linecap: round }}</style>\n" + "\n".join(lines) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
