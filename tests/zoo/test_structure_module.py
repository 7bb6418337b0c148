"""The structure module against ESMFold's, its losses against loops, frames of real structures."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import draw
from zoo.data.protein.record import ATOMS, encode
from zoo.data.protein.structure import read_structure
from zoo.data.protein.write import write_structure
from zoo.protein.atoms import backbone, frames_of
from zoo.protein.metrics import distance_lddt, rmsd
from zoo.protein.structure import StructureModule, rotation_of
from zoo.protein.structure_losses import FrameAlignedPointError, lddt_of_residues
from zoo.protein.structure_weights import from_reference
from zoo.training.outputs.predicted import bonded
from zoo.training.tasks.protein import structure_inputs

with warnings.catch_warnings(action="ignore"):
    from transformers.models.esm.configuration_esm import StructureModuleConfig
    from transformers.models.esm.modeling_esmfold import EsmFoldStructureModule
    from transformers.models.esm.openfold_utils.rigid_utils import Rigid


def esmfold() -> EsmFoldStructureModule:
    torch.manual_seed(0)
    sizes = {"sequence_dim": 24, "pairwise_dim": 16, "num_heads_ipa": 3, "num_v_points": 5, "num_blocks": 3}
    found = EsmFoldStructureModule(StructureModuleConfig(**sizes, dropout_rate=0.0))
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return found.eval()


@pytest.mark.parametrize("chunk", [2**28, 60])
def test_frames_are_those_of_esmfold(chunk: int) -> None:
    theirs, mask = esmfold(), torch.ones(2, 9)
    mask[1, 6:] = 0
    s, z = torch.randn(2, 9, 24), torch.randn(2, 9, 9, 16)
    found = theirs({"single": s, "pair": z}, torch.randint(20, (2, 9)), mask)
    expect = Rigid.from_tensor_7(found["frames"].transpose(0, 1))
    rotation, translation, _ = from_reference(theirs.state_dict(), 3, chunk=chunk).eval()(s, z, mask.bool())
    there = mask.bool()[:, None].expand(2, 3, 9)
    torch.testing.assert_close(rotation[there], expect.get_rots().get_rot_mats()[there], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(translation[there], expect.get_trans()[there], atol=1e-4, rtol=1e-4)


def test_weights_of_another_module_are_refused() -> None:
    state = esmfold().state_dict()
    with pytest.raises(ValueError, match=r"missing: .ipa\.linear_b\.weight"):
        from_reference({name: value for name, value in state.items() if name != "ipa.linear_b.weight"})
    more = {name.replace("layers.0", "layers.1"): value for name, value in state.items()}
    refused("2 transitions an iteration", from_reference, state | more)


def fape_by_loops(rotation: Tensor, points: Tensor, true_rotation: Tensor, true: Tensor, seen: Tensor) -> Tensor:
    found = torch.zeros(len(points))
    for i in range(len(points)):
        errors = []
        for j in range(len(points)):
            own = rotation[i].T @ (points[j] - points[i])
            aim = true_rotation[i].T @ (true[j] - true[i])
            off = ((own - aim).square().sum() + 1e-4).sqrt()
            errors += [0.9 * off.clamp(max=10) + 0.1 * off] if seen[j] else []
        found[i] = torch.stack(errors).mean() / 10
    return found


def test_the_frame_aligned_point_error() -> None:
    torch.manual_seed(0)
    rotations, points = rotation_of(torch.randn(2, 6, 3)), 12 * torch.randn(2, 6, 3)  # of two iterations
    true_rotation, true, seen = rotation_of(torch.randn(6, 3)), 12 * torch.randn(6, 3), torch.ones(6)
    seen[2] = 0
    by_loops = [fape_by_loops(r, p, true_rotation, true, seen) for r, p in zip(rotations, points)]
    loss = FrameAlignedPointError()

    def error(r: Tensor, p: Tensor) -> Tensor:
        given = r[None], p[None], p[None], true_rotation[None], true[None], true[None], seen[None], seen[None]
        return loss(*given)[0][0]

    torch.testing.assert_close(error(rotations, points), 0.75 * by_loops[1] + 0.25 * by_loops[0])
    assert error(true_rotation[None], true[None]).max() < 2e-3
    mirror = torch.tensor([1.0, 1.0, -1.0])
    assert error(mirror[:, None] * true_rotation[None] * mirror, true[None] * mirror).min() > 0.1


def test_backbones_of_real_structures_come_back_from_their_frames() -> None:
    protein = read_structure(STRUCTURES / "1A8O.cif.gz")
    n, ca, c, o, cb = (torch.from_numpy(protein.atoms(name)[0]).double() for name in ATOMS)
    rotation, translation = frames_of(n, ca, c)
    torch.testing.assert_close(rotation.mT @ rotation, torch.eye(3).double().expand_as(rotation))
    atoms = backbone(rotation, translation, torch.from_numpy(encode(protein.sequence)).long(), bonded(protein))
    glycine = torch.tensor([letter == "G" for letter in protein.sequence])
    for name, true, off in (("N", n, 0.2), ("CA", ca, 1e-6), ("C", c, 0.1), ("O", o, 0.3)):
        assert (atoms[:-1, ATOMS.index(name)] - true[:-1]).norm(dim=-1).max() < off, name
    assert (atoms[:, 4] - cb)[~glycine].norm(dim=-1).max() < 0.3
    turn, every = rotation_of(torch.tensor([0.3, -2.0, 0.9]).double()), torch.ones(len(ca)).bool()
    assert rmsd(ca @ turn.T + 5, ca, every) < 1e-5
    assert rmsd(ca * torch.tensor([1.0, 1.0, -1.0]), ca, every) > 5


def test_lddt_of_residues_is_that_of_their_distances() -> None:
    torch.manual_seed(0)
    true, seen = 8 * torch.randn(11, 3), torch.arange(11) % 4 > 0
    made = true + torch.randn(11, 3)
    found = lddt_of_residues(made[None], made[None], true[None], true[None], seen[None].float())[0]
    expect = distance_lddt(torch.cdist(made, made), true, seen)
    assert found[seen].mean().item() == pytest.approx(expect, rel=1e-5)


def test_a_written_structure_is_read_back(tmp_path) -> None:
    data = EmbeddedProteins("validation")
    protein = next(data.protein(i) for i in range(len(data)) if len(data.protein(i).chains) > 1)
    frames = frames_of(*(torch.from_numpy(protein.atoms(name)[0]) for name in ("N", "CA", "C")))
    sequence = torch.from_numpy(encode(protein.sequence)).long()
    atoms = backbone(*frames, sequence, bonded(protein)).numpy()
    confidence = np.linspace(0, 100, len(protein))
    write_structure(tmp_path / "made.cif", protein, atoms, confidence)
    found = read_structure(tmp_path / "made.cif")
    assert found.sequence == protein.sequence
    assert found.chains == protein.chains
    assert (found.asym_id == protein.asym_id).all()
    assert (found.residue_index == protein.residue_index).all()
    np.testing.assert_allclose(found.positions[:, :4], atoms[:, :4], atol=1e-3)
    factors = [line.split()[14] for line in (tmp_path / "made.cif").read_text().splitlines() if line.startswith("ATOM")]
    assert (float(factors[0]), float(factors[-1])) == (0.0, 100.0)


def test_gradients_lead_to_a_given_fold() -> None:
    """A few steps bring a free s and z to a given fold: gradients lead there."""
    torch.manual_seed(0)
    protein = EmbeddedProteins().protein(0).take(np.arange(16))
    true = structure_inputs(draw(protein, 0, residues=16, rows=1))
    module, loss = StructureModule(32, 16, 4, heads=4, dropout=0.0), FrameAlignedPointError()
    s, z = (torch.randn(1, *shape).requires_grad_() for shape in ((16, 32), (16, 16, 16)))
    optimizer = torch.optim.AdamW([s, z, *module.parameters()], 3e-3)
    aim = [true[key][None] for key in ("true_rotation", "true_translation", "true_translation", "seen", "frame_weight")]
    for _ in range(100):
        rotation, points, _ = module(s, z)
        error, weight = loss(rotation, points, points, *aim)
        optimizer.zero_grad()
        (error * weight).sum().backward()
        optimizer.step()
    found = lddt_of_residues(*(points[:, -1],) * 2, *(true["true_translation"][None],) * 2, true["seen"][None])
    assert found.mean() > 0.8
    assert F.l1_loss(rotation @ rotation.mT, torch.eye(3).expand_as(rotation)) < 1e-5
