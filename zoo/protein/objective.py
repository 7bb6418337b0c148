"""The objectives of models of proteins: hidden letters of the alignment, and distances of pairs.

Letters: b batch, s rows of the alignment, r residues, i j residues of a pair, v classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.protein.distogram import BINS, CONTACT, edges
from zoo.protein.embedding import CLASSES
from zoo.protein.structure_losses import STRUCTURE_LOSSES, ConfidenceEntropy, FrameAlignedPointError

__all__ = ["Frequencies", "ProteinObjective"]

_REACH = 32
MSA_WEIGHT, PAIR_WEIGHT, LDDT_WEIGHT = 2.0, 0.3, 0.01  # AlphaFold 2, supplement, 1.9, equation 7


class CrossEntropy(nn.Module):
    """scale × -log softmax(logits)[target] of every element, (... v) and (...) -> (...), in float32 at least.

    The weight (...) is returned unchanged, so that it is sharded like the loss.
    """

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        return self.scale * loss.view(target.shape), weight


class ContactEntropy(nn.Module):
    """scale × binary cross entropy of contact, from logits of bins (... v), for every pair (...); weights unchanged.

    A contact is a distance in the bins entirely below 8 Å; the bin that 8 Å divides counts as no contact.
    """

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.below = scale, int((edges(torch.device("cpu")) < CONTACT).sum())

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        odds = logits[..., : self.below].logsumexp(-1) - logits[..., self.below :].logsumexp(-1)
        loss = F.binary_cross_entropy_with_logits(odds, (target < self.below).to(odds.dtype), reduction="none")
        return self.scale * loss, weight


class ProteinObjective(nn.Module):
    """Masked-MSA and distogram cross entropy on `model(**inputs)`, whose first outputs are the logits of both.

    AlphaFold 2, supplement, 1.9.9 and 1.9.8, weighted 2 and 0.3. The distogram has 64 bins (zoo/protein/distogram.py).
    With a weight `contacts`, also the cross entropy of contact or none; one pair in fifty is in contact.
    """

    def __init__(self, model: nn.Module, contacts: float = 0.0):
        super().__init__()
        self.model = model
        self.letters, self.distances = CrossEntropy(MSA_WEIGHT), CrossEntropy(PAIR_WEIGHT)
        self.contacts = ContactEntropy(contacts) if contacts else None
        self.folds = bool(getattr(model, "structure", None))
        if self.folds:
            self.fape, self.confidence = FrameAlignedPointError(), ConfidenceEntropy(LDDT_WEIGHT)

    @property
    def stages(self) -> dict[str, str]:
        """The stages of the wrapped model for `dsp.parallelize(objective, mesh)`, with the objective's own inputs."""
        return self._around(self.model.stages)  # type: ignore[arg-type]

    @property
    def dap(self) -> dict[str, str]:
        """The stages in FastFold's layouts, for `dsp.embedded`."""
        return self._around(self.model.dap)  # type: ignore[arg-type]

    def _around(self, inner: Mapping[str, str]) -> dict[str, str]:
        stages = dict(inner)
        inputs, _ = stages.pop("").split("->")
        targets = "msa_target=b s r, msa_weight=b s r, bins=b i j, pair_weight=b i j, contact_weight=b i j"
        return {
            "": f"{inputs.strip()}, {targets}",
            **{f"model.{name}": stage for name, stage in stages.items()},
            "letters": "b s r [v], target=b s r, weight=b s r -> b s r, b s r",
            **dict.fromkeys(
                ("distances", "contacts") if self.contacts else ("distances",),
                "b i j [v], target=b i j, weight=b i j -> b i j, b i j",
            ),
            **(STRUCTURE_LOSSES if self.folds else {}),
        }

    def forward(
        self,
        msa_target: Tensor,
        msa_weight: Tensor,
        bins: Tensor,
        pair_weight: Tensor,
        contact_weight: Tensor | None = None,
        true_rotation: Tensor | None = None,
        true_translation: Tensor | None = None,
        seen: Tensor | None = None,
        frame_weight: Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Loss and weight of every element: {"msa": [b s r], "distogram": [b i j]}; the loss sums the terms' averages.

        With a weight of contacts also {"contacts": [b i j]}; with a structure module also {"fape": [b i], "lddt":
        [b i]}.

        `msa_target` and `bins` are classes (b s r) and (b i j). Weights are 1 or 0: `msa_weight` is 1 for letters to be
        predicted, `pair_weight` for pairs whose residues were both seen, `contact_weight` for those among them that are
        far apart along the chain. `inputs` are the model's inputs, including `recycles`: earlier passes have no
        gradient and no loss.

        `true_rotation` (b r 3 3) and `true_translation` (b r 3) Å are the frames of the residues, `seen` (b r) is True
        for residues that were seen, and `frame_weight` (b r) weights them.
        """
        out = self.model(**inputs)
        letters, distances, *_ = out
        terms = {
            "msa": self.letters(letters, msa_target, msa_weight),
            "distogram": self.distances(distances, bins, pair_weight),
        }
        if self.contacts is not None:
            terms["contacts"] = self.contacts(distances, bins, contact_weight)
        if self.folds:
            true, rotation, points = true_translation, out.rotation, out.translation
            terms["fape"] = self.fape(rotation, points, points, true_rotation, true, true, seen, frame_weight)
            last = points[:, -1].detach()
            terms["lddt"] = self.confidence(out.lddt_logits, last, last, true, true, seen, frame_weight)
        return terms


class Frequencies:
    """A baseline without a model: frequencies in training samples (without a batch dim) predict other samples.

    The prediction for a hidden letter is the frequencies in the rest of its column, with those of all training data as
    a prior worth one row. Letters of the first row have no loss, since models get the sequence as an input (as in AF2).
    The prediction for a distance is the frequencies of bins in training data at the same separation along the chain (up
    to 32; one class for two chains), plus one count for each bin.
    """

    def __init__(self, samples: Sequence[Mapping[str, Tensor]], contacts: float = 0.0):
        self.contacts = ContactEntropy(contacts) if contacts else None
        letters, bins = torch.ones(CLASSES), torch.ones(_REACH + 2, BINS)
        for sample in samples:
            letters += torch.bincount(sample["msa_target"][sample["msa_mask"]], minlength=CLASSES)
            seen, offset = sample["pair_weight"].bool(), separation(sample["residue_index"], sample["asym_id"])
            bins.index_put_((offset[seen], sample["bins"][seen]), torch.ones(()), accumulate=True)
        self.letters, self.bins = letters / letters.sum(), bins / bins.sum(1, keepdim=True)

    def distogram(self, residue_index: Tensor, asym_id: Tensor) -> Tensor:
        """Log-probabilities [i, j, 64] of the distances between residues [r]."""
        return self.bins.log()[separation(residue_index, asym_id)]

    def losses(self, sample: Mapping[str, Tensor]) -> dict[str, float]:
        """The terms of the objective on one sample."""
        shown = sample["msa_mask"] & ~sample["msa_weight"].bool()
        columns = F.one_hot(sample["msa_target"], CLASSES) * shown[..., None]
        profile = columns.sum(0) + self.letters
        profile = (profile / profile.sum(-1, keepdim=True)).log()
        of_letters = -profile.gather(1, sample["msa_target"].T).T
        of_letters[0] = 0
        logits = self.distogram(sample["residue_index"], sample["asym_id"])
        of_pairs = -logits.gather(-1, sample["bins"][..., None])[..., 0]
        terms = {
            "msa": MSA_WEIGHT * (of_letters * sample["msa_weight"]).sum() / sample["msa_weight"].sum(),
            "distogram": PAIR_WEIGHT * (of_pairs * sample["pair_weight"]).sum() / sample["pair_weight"].sum(),
        }
        if self.contacts is not None:
            loss, weight = self.contacts(logits, sample["bins"], sample["contact_weight"])
            terms["contacts"] = (loss * weight).sum() / weight.sum()
        return {name: term.item() for name, term in terms.items()}


def separation(residue_index: Tensor, asym_id: Tensor) -> Tensor:
    """The separation of i and j along the chain [i, j], at most 32; 33 for two chains."""
    offset = (residue_index[:, None] - residue_index).abs().clamp(max=_REACH)
    return offset.masked_fill(asym_id[:, None] != asym_id, _REACH + 1)
