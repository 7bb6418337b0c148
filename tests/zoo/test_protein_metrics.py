"""Metrics, floors, pictures and the objective of proteins, against loops or others' code; the objective over ranks."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from dsp.support.tensors import tensors_in
from tests.support.parity import assert_step_equal, averaged
from tests.support.refusals import refused
from tests.support.runs import Heard
from tests.support.slow import long, slow
from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import draw
from zoo.data.protein.record import ATOMS
from zoo.data.protein.synthetic import PottsFamilies
from zoo.protein.distogram import BINS, contact_probability, distances, distogram_bins, expected_distance
from zoo.protein.metrics import (
    average,
    contact_precision,
    distance_lddt,
    masked_accuracy,
    range_of_pairs,
)
from zoo.protein.objective import Frequencies, ProteinObjective
from zoo.protein.picture import HIT, LIKELY, MISS, UNSEEN, ContactMap, save_contact_maps
from zoo.training.model import recomputed_modules, repeated_stages
from zoo.training.outputs.predicted import Predicted
from zoo.training.tasks.protein import structure_inputs


def every_protein():
    return [data.protein(i) for data in map(EmbeddedProteins, ("train", "validation")) for i in range(len(data))]


def real(name):
    """Position [r, 3], seen [r], residue_index [r], asym_id [r] of a structure that comes along."""
    (protein,) = (protein for protein in every_protein() if protein.name == name)
    arrays = (*protein.contact_atoms(), protein.residue_index, protein.asym_id)
    return tuple(torch.from_numpy(array) for array in arrays)


# Metrics


@pytest.mark.parametrize("name", ["1ubq", "2q2k"])
def test_contact_precision_against_loops(name):
    position, seen, index, chain = real(name)
    r, length = len(seen), int(seen.sum())
    score = torch.rand(r, r, generator=torch.Generator().manual_seed(0))
    found = contact_precision(score, position, seen, index, chain)
    x = position.numpy()
    for kind, low, high in (("short", 6, 11), ("medium", 12, 23), ("long", 24, 1000), ("inter", None, None)):
        pairs = []
        for i in range(r):
            for j in range(i + 1, r):
                apart = int(index[j] - index[i])
                inside = chain[i] == chain[j] and low is not None and low <= apart <= high
                if seen[i] and seen[j] and (inside or (low is None and chain[i] != chain[j])):
                    pairs.append((float(score[i, j]), bool(np.linalg.norm(x[i] - x[j]) < 8)))
        pairs.sort(reverse=True)
        if not any(contact for _, contact in pairs):
            assert not any(key.startswith(kind) for key in found)
            continue
        for part, count in (("L", length), ("L/2", length // 2), ("L/5", length // 5)):
            best = [contact for _, contact in pairs[:count]]
            assert found[f"{kind} P@{part}"] == pytest.approx(sum(best) / len(best))
    assert ("inter P@L" in found) == (name == "2q2k")
    true = contact_precision(-distances(position, position), position, seen, index, chain)
    assert true["inter P@L/5" if name == "2q2k" else "long P@L/5"] == 1


def test_distance_lddt_against_loops():
    position, seen, *_ = real("1ubq")
    position, seen = position[:30].double(), seen[:30].clone()
    seen[7] = False
    true = distances(position, position)
    predicted = true + 2 * torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = []
    for i in range(30):
        hits = [
            sum(abs(predicted[i, j] - true[i, j]) < t for t in (0.5, 1, 2, 4)) / 4
            for j in range(30)
            if i != j and seen[i] and seen[j] and true[i, j] < 15
        ]
        scores += [sum(hits) / len(hits)] if hits else []
    assert distance_lddt(predicted, position, seen) == pytest.approx(float(sum(scores) / len(scores)))
    assert distance_lddt(true, position, seen) == 1
    assert distance_lddt(true, position, seen & False) is None


def test_a_backbone_of_no_use_is_named():
    """Neighbouring Cα at random weights are hundredths of an Å apart; those of a real chain are not."""
    protein = next(p for p in every_protein() if p.resolved[:, ATOMS.index("CA")].all() and len(p.chains) == 1)
    atoms, flat = torch.from_numpy(protein.positions), torch.zeros(len(protein), len(protein))
    assert Predicted(protein, flat, flat, atoms=atoms).unusable() == ""
    assert Predicted(protein, flat, flat).unusable() == ""
    near = Predicted(protein, flat, flat, atoms=atoms * 0.03 / 3.8).unusable()
    assert near == "unusable backbone: neighbouring Cα are 0.03 Å apart, where 3.8 Å are expected"
    assert "are 38." in Predicted(protein, flat, flat, atoms=atoms * 10).unusable()


def test_lddt_of_calpha_atoms_against_biotite():
    """A prediction with all distances of contact atoms right: how far it can get is the geometry's."""
    structure = pytest.importorskip("biotite.structure")
    ceilings = []
    for protein in every_protein():
        (beta, seen), (alpha, found) = protein.contact_atoms(), protein.atoms("CA")
        both = seen & found
        distance = distances(*[torch.from_numpy(beta)] * 2)
        measured = Predicted(protein, -distance, distance).measure()
        assert measured["lDDT-Cβ"] == 1
        ceilings.append(measured["lDDT-Cα"])
        if (both == found).all():  # else a residue of which one atom alone was seen has distances from nowhere
            atoms = structure.AtomArray(int(both.sum()))
            atoms.coord, atoms.res_id = alpha[both], np.arange(both.sum())
            moved = atoms.copy()
            moved.coord = beta[both]
            theirs = structure.lddt(atoms, moved, aggregation="residue", exclude_same_residue=True).mean()
            assert measured["lDDT-Cα"] == pytest.approx(theirs, abs=1e-4)
        exact = distances(*[torch.from_numpy(alpha)] * 2)
        assert Predicted(protein, -exact, exact).measure()["lDDT-Cα"] == 1
    assert sum(ceilings) / len(ceilings) == pytest.approx(0.683, abs=0.002)  # docs/protein-guide.md


def test_masked_accuracy_and_average():
    letters = torch.tensor([[1, 2, 3], [4, 5, 6]])
    target = torch.tensor([[1, 0, 3], [0, 0, 0]])
    assert masked_accuracy(letters, target, torch.tensor([[1.0, 1, 1], [0, 0, 0]])) == pytest.approx(2 / 3)
    assert average([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}


# Distogram


def test_distances_from_a_distogram():
    true = torch.tensor([0.5, 2.3, 4.0, 7.9, 8.1, 12.1, 21.6, 21.7, 60.0])
    bins = distogram_bins(true)
    assert bins.tolist() == [0, 0, 6, 18, 19, 32, 62, 63, 63]
    logits = 50 * F.one_hot(bins, BINS).float()
    inside = (true > 2.4) & (true < 21.7)
    torch.testing.assert_close(expected_distance(logits)[inside], true[inside], atol=0.16, rtol=0)
    # 8 Å lies in bin 19 (7.9375 to 8.25), a fifth of it below
    torch.testing.assert_close(contact_probability(logits), torch.tensor([1, 1, 1, 1, 0.2, 0, 0, 0, 0.0]))
    even = contact_probability(torch.zeros(BINS))
    assert even.item() == pytest.approx(19.2 / 64)


# Picture


def test_a_contact_map_shows_what_was_found(tmp_path):
    position, seen, index, chain = real("2q2k")
    contact = distances(position, position) < 8
    map_ = ContactMap("2q2k", contact.float(), position, seen, index, chain)
    pixels = map_.pixels()
    there = seen[:, None] & seen
    counted = torch.stack(list(range_of_pairs(index, chain).values())).any(0) & there
    right, wrong = ((pixels == colour).all(-1) for colour in (HIT, MISS))
    upper = np.triu(np.ones_like(right))
    assert (right & upper).sum() == min(int((contact & counted).sum()), int(seen.sum()))
    assert (wrong & upper).sum() == int(seen.sum()) - (right & upper).sum()
    assert ((pixels == UNSEEN).all(-1) == ~there.numpy()).all()
    assert not (right & ~contact.numpy()).any()
    unknown = ContactMap("?", contact.float(), position, torch.zeros_like(seen), index, chain).pixels()
    assert (unknown == LIKELY).all(-1).sum() == len(seen)
    assert not any((unknown == colour).all(-1).any() for colour in (HIT, MISS))
    save_contact_maps(tmp_path / "samples" / "a.png", [map_, map_])
    with Image.open(tmp_path / "samples" / "a.png") as image:
        assert image.width > 800
        assert image.height > 400
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["a.png"]


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    map_ = ContactMap("1ubq", torch.zeros(76, 76), *real("1ubq"))
    monkeypatch.setattr(Image.Image, "save", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    refused("No space", save_contact_maps, tmp_path / "a.png", [map_], error=OSError)
    assert not list(tmp_path.iterdir())


# Objective


def batch(count=2, residues=13, rows=8, extra=0, structure=False):
    data = PottsFamilies(families=count, residues=residues - 1, rows=rows + extra, sweeps=2)
    samples = [draw(data.protein(i), 0, i, residues=residues, rows=rows, extra=extra) for i in range(count)]
    parts = [e.alignment() | e.single() | e.pairs() | (e.extra_alignment() if extra else {}) for e in samples]
    parts = [part | (structure_inputs(e) if structure else {}) for part, e in zip(parts, samples)]
    inputs = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: x.double() if x.is_floating_point() and structure else x for name, x in inputs.items()}


def build(model="evoformer", **overrides) -> nn.Module:
    torch.manual_seed(0)
    objective = ProteinObjective(zoo.create(model, "test", bins=BINS, **overrides), contacts=1.5).double()
    for p in objective.parameters():
        nn.init.normal_(p, std=0.2)
    return objective


def test_objective_against_loops():
    objective, inputs = build(extra_depth=0), batch()
    given = {
        k: v
        for k, v in inputs.items()
        if k not in ("msa_target", "msa_weight", "bins", "pair_weight", "contact_weight")
    }
    letters, bins, _ = objective.model(**given)
    terms = objective(**inputs)
    for name, logits, target, scale in (("msa", letters, "msa_target", 2.0), ("distogram", bins, "bins", 0.3)):
        loss, weight = terms[name]
        assert loss.shape == weight.shape == inputs[target].shape
        for at in ((0, 0, 0), (1, 3, 7), (1, 7, 11)):
            row = logits[at].tolist()
            expected = math.log(sum(map(math.exp, row))) - row[int(inputs[target][at])]
            assert loss[at].item() == pytest.approx(scale * expected, rel=1e-10)
    loss, weight = terms["contacts"]
    for i, j in ((1, 2), (3, 7), (0, 11)):
        inside = bins[0, i, j].exp()[:19].sum() / bins[0, i, j].exp().sum()  # the last edge below 8 Å is at 7.94
        told = inside if inputs["bins"][0, i, j] < 19 else 1 - inside
        assert loss[0, i, j].item() == pytest.approx(-1.5 * told.log().item(), rel=1e-9)
    assert torch.equal(weight, inputs["contact_weight"])
    assert torch.equal(terms["msa"][1], inputs["msa_weight"])
    assert torch.equal(terms["distogram"][1], inputs["pair_weight"])
    assert terms["distogram"][1][:, -1].sum() == 0  # padding


def mean_of(*terms):
    """The mean of the loss and the weight of each term in turn."""
    return sum(dsp.mean(loss, weight) for loss, weight in zip(terms[::2], terms[1::2]))


def whole_gradients(model, mesh):
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() for n, g in grads.items()}


STRUCTURE = {"structure": 2, "structure_heads": 2}


def parity(mesh, model, extra=0, recycles=(0,), fsdp=False, **structure) -> list[str]:
    overrides = {"depth": 1, **structure} | ({"extra_depth": int(extra > 0)} if model == "evoformer" else {})
    single, parallel = build(model, **overrides), build(model, **overrides)
    dsp.parallelize(parallel, mesh, gather_output=False)
    if fsdp:  # as train.py does it
        for stage in repeated_stages(parallel.model):
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)
            fully_shard(stage, mesh=mesh)
        fully_shard(parallel.model, mesh=mesh)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # as in train.py
    gradients = whole_gradients if fsdp else averaged
    with Heard() as heard:
        for passes in recycles:
            single.zero_grad()
            inputs = batch(residues=11, rows=7, extra=extra, structure=bool(structure)) | {"recycles": passes}
            assert_step_equal(
                single, parallel, mesh, inputs, loss=mean_of, gradients=gradients, rounds=1 + bool(structure)
            )
    return heard.texts


@pytest.mark.parametrize(
    ("n", "model", "options"),
    [
        slow(3, "pairformer", STRUCTURE), slow(2, "evoformer", {**STRUCTURE, "extra": 2}),
        slow(4, "evoformer", {**STRUCTURE, "extra": 2}), slow(2, "pairformer", {"recycles": (2, 0)}),
        slow(3, "evoformer", {"recycles": (2, 0), "extra": 5, "fsdp": True}),
        long(3, "evoformer", {"recycles": (2, 0), "extra": 5}),
        long(2, "pairformer", {"recycles": (2, 0), "fsdp": True}),
    ],
)  # fmt: skip
def test_losses_and_every_gradient(ranks, n, model, options):
    """On uneven parts, of recycled passes and of structures; and what is sent is what the plan says."""
    assert ranks(partial(parity, **options), n, model)[0] == []


def moved(mesh: DeviceMesh, model: str, recycles: int, way: str):
    objective = build(model, **({"extra_depth": 0} if model == "evoformer" else {})).float()
    for module in recomputed_modules(objective.model)[way]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    inputs = batch(residues=16, rows=8) | {"recycles": recycles}
    plan = dsp.plan(objective, kwargs=inputs, size=mesh.size(), gather_output=False)
    dsp.parallelize(objective, mesh, gather_output=False)
    with dsp.count_comm() as comm:
        mean_of(*tensors_in(objective(**inputs))).backward()
    phases = {"forward": comm.forward, "backward": comm.backward, "recompute": comm.recompute}
    sent = {k: sum(v for name, v in phase.bytes.items() if name != "all_reduce") for k, phase in phases.items()}
    return plan.bytes, sent


@pytest.mark.parametrize("way", ["stages", "blocks"])
@pytest.mark.parametrize("model", [slow("evoformer"), long("pairformer")])
def test_a_recycled_pass_is_planned_as_it_is_sent(ranks, model, way):
    (once, sent), (thrice, sent_thrice) = (ranks(moved, 2, model, recycles, way)[0] for recycles in (0, 2))
    assert (once, thrice) == (sent, sent_thrice)  # the last residues of a Pairformer have no loss, so no gradient
    assert 2.5 * once["forward"] < thrice["forward"] < 3 * once["forward"]
    for phase in ("backward", "recompute"):  # of the last pass alone
        assert thrice[phase] == once[phase]


def test_the_frequency_baseline_against_loops():
    data = PottsFamilies(families=6, residues=12, rows=7, sweeps=2)
    samples = [draw(data.protein(i), 0, i, residues=13, rows=7) for i in range(6)]
    samples = [e.alignment() | e.single() | e.pairs() for e in samples]
    train, validation = samples[:4], samples[4:]

    def separation(sample, i, j):
        same_chain = sample["asym_id"][i] == sample["asym_id"][j]
        return min(32, abs(int(sample["residue_index"][i] - sample["residue_index"][j]))) if same_chain else 33

    letters, bins = np.ones(23), np.ones((34, 64))
    for sample in train:
        letters += np.bincount(sample["msa_target"][:, :12].flatten(), minlength=23)
        for i, j in np.ndindex(12, 12):
            bins[separation(sample, i, j), sample["bins"][i, j]] += float(sample["pair_weight"][i, j])
    letters /= letters.sum()
    floor = Frequencies(train, contacts=1.5)
    for sample in validation:
        of_letters, of_pairs, of_contacts = [], [], []
        for i, j in np.ndindex(7, 12):
            if sample["msa_weight"][i, j] and i == 0:
                of_letters.append(0)  # the sequence tells it
            elif sample["msa_weight"][i, j]:
                column = [int(sample["msa_target"][k, j]) for k in range(7) if not sample["msa_weight"][k, j]]
                a = int(sample["msa_target"][i, j])
                of_letters.append(-math.log((column.count(a) + letters[a]) / (len(column) + 1)))
        for i, j in np.ndindex(12, 12):
            if sample["pair_weight"][i, j]:
                row = bins[separation(sample, i, j)]
                of_pairs.append(-math.log(row[sample["bins"][i, j]] / row.sum()))
                below, weight = np.arange(64) < 19, sample["contact_weight"][i, j].item()
                told = row[below == bool(sample["bins"][i, j] < 19)].sum() / row.sum()
                of_contacts.append((weight, -weight * math.log(told)))
        losses = floor.losses(sample)
        assert losses["msa"] == pytest.approx(2 * np.mean(of_letters), rel=1e-5)
        assert losses["distogram"] == pytest.approx(0.3 * np.mean(of_pairs), rel=1e-5)
        assert losses["contacts"] == pytest.approx(1.5 * np.divide(*np.sum(of_contacts, 0)[::-1]), rel=1e-4)
        guess = floor.distogram(sample["residue_index"], sample["asym_id"]).exp()
        row = bins[separation(sample, 2, 9)]
        torch.testing.assert_close(guess[2, 9].double(), torch.from_numpy(row / row.sum()), atol=1e-6, rtol=1e-5)
