"""Contacts as CSV tables and PNG maps: predictions above the diagonal, true contacts below it."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.data.protein.record import Protein
from zoo.files import whole_file
from zoo.protein.distogram import CONTACT, distances
from zoo.protein.metrics import RANGES, range_of_pairs

__all__ = ["ContactMap", "save_contact_maps", "write_contacts", "write_probabilities", "write_scores"]

HIT, MISS, LISTED, OVERLOOKED = (23, 142, 84), (214, 69, 65), (23, 142, 84), (120, 130, 142)
PAPER, INK, UNSEEN, LINE, NEAR = (255, 255, 255), (40, 44, 52), (238, 238, 240), (70, 110, 190), (208, 213, 219)
LIKELY = (52, 96, 178)  # the L most likely pairs where no truth is known
SHADE = np.array([150, 178, 224])  # colour of probability 1 outside the L most likely pairs
FAINT = 0.35  # opacity of the L most likely pairs at probability 0
SIDE = 840  # approximate pixels of a map, twice the displayed size: small letters would be spaced badly
COLUMNS = ("i", "j", "chain_i", "chain_j", "residue_i", "residue_j", "number_i", "number_j", "range")


@dataclass
class ContactMap:
    """One protein: `probability` [r, r] of contact, `position` [r, 3] Å and `seen` [r] of its contact atoms.

    If no atom was seen, only probabilities and the likeliest pairs are drawn.
    """

    title: str
    probability: Tensor
    position: Tensor
    seen: Tensor
    residue_index: Tensor
    asym_id: Tensor

    @property
    def known(self) -> bool:
        """Tell whether any atom was seen."""
        return bool(self.seen.any())

    def pixels(self) -> np.ndarray:
        """One pixel a pair [r, r, 3], uint8. Pairs nearer than 6 along a chain do not count and are drawn pale."""
        r, known = len(self.seen), self.known
        seen = self.seen if known else ~self.seen
        pair_mask = seen[:, None] & seen
        ranges = range_of_pairs(self.residue_index, self.asym_id)
        counted = torch.stack(list(ranges.values())).any(0) & pair_mask  # above the diagonal
        contact = (distances(self.position, self.position) < CONTACT) & pair_mask & known
        best = torch.where(counted, self.probability, -1.0).flatten().topk(int(seen.sum())).indices
        top = torch.zeros(r * r, dtype=torch.bool).index_fill(0, best, True).view(r, r) & counted

        image = np.full((r, r, 3), PAPER, np.float64)
        strength = self.probability.clamp(0, 1)[..., None].double().numpy() ** 0.7
        upper = torch.ones(r, r).triu(1).bool()

        def paint(mask: Tensor, colour: Any, opacity: Any = 1.0) -> None:
            image[mask.numpy()] = np.broadcast_to(PAPER + (np.array(colour) - PAPER) * opacity, image.shape)[mask]

        paint(upper & pair_mask, SHADE, strength)
        paint(contact.tril(-1), NEAR)
        paint(contact & counted.T, OVERLOOKED)
        paint(contact & counted.T & top.T, LISTED)
        paint(top & contact, HIT, FAINT + (1 - FAINT) * strength)
        paint(top & ~contact, MISS if known else LIKELY, FAINT + (1 - FAINT) * strength)
        paint(~pair_mask, UNSEEN)
        return image.astype(np.uint8)

    def draw(self) -> Any:
        from PIL import Image, ImageDraw, ImageFont

        r = len(self.seen)
        scale = max(1, round(SIDE / r))
        side, left, top, right = r * scale, 68, 52, 20
        image = Image.new("RGB", (left + side + right, top + side + 84 + 34 * self.known), PAPER)
        map_ = Image.fromarray(self.pixels()).resize((side, side), Image.Resampling.NEAREST)
        image.paste(map_, (left, top))
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=23)
        pen.line((left, top, left + side, top + side), fill=INK, width=2)
        for i in (self.asym_id.diff().nonzero().flatten() + 1).tolist():  # where a chain begins
            pen.line((left, top + i * scale, left + side, top + i * scale), fill=LINE)
            pen.line((left + i * scale, top, left + i * scale, top + side), fill=LINE)
        pen.rectangle((left - 1, top - 1, left + side, top + side), outline=INK, width=2)
        every = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 10**9) if r / step <= 10)
        for i in range(0, r, every):
            y = top + i * scale + scale // 2
            pen.line((left - 8, y, left - 1, y), fill=INK, width=2)
            pen.text((left - 14, y), str(i), fill=INK, font=font, anchor="rm")
        pen.text((left, top - 14), self.title, fill=INK, font=ImageFont.load_default(size=25), anchor="ls")
        x, y, near = left, top + side + 24, RANGES["short"][0]
        keys = (
            [(HIT, "right"), (MISS, "wrong"), (OVERLOOKED, "overlooked"), (NEAR, f"fewer than {near} residues apart")]
            if self.known
            else [(LIKELY, "predicted")]
        )
        for colour, words in (*keys, (tuple(SHADE), "likely")):
            pen.rectangle((x, y - 8, x + 16, y + 8), fill=colour)
            pen.text((x + 26, y), words, fill=INK, font=font, anchor="lm")
            x += 26 + round(font.getlength(words)) + 32
        notes = [f"above: the L most likely pairs, {near} or more apart, the paler the less likely"]
        for i, note in enumerate(notes + ["below: true contacts"] * self.known, 1):
            pen.text((left, y + 34 * i), note, fill=INK, font=font, anchor="lm")
        return image


def save_contact_maps(path: str | os.PathLike[str], maps: Sequence[ContactMap]) -> None:
    """Write contact maps side by side as one PNG. The file appears complete or not at all."""
    from PIL import Image

    images = [contact_map.draw() for contact_map in maps]
    whole = Image.new("RGB", (sum(i.width for i in images), max(i.height for i in images)), PAPER)
    x = 0
    for image in images:
        whole.paste(image, (x, 0))
        x += image.width
    with whole_file(path) as file:
        whole.save(file, "PNG")


def write_contacts(path: Path, protein: Protein, probability: Tensor, distance: Tensor, least: float) -> None:
    """Write the pairs with at least probability `least` of contact, likeliest first, without neighbours (below 6).

    i and j count the residues of all chains from 0; residue numbers are the authors'; distances are means, in Å.
    """
    _write_pairs(path, protein, probability >= least, {"probability": (probability, 4), "distance": (distance, 2)})


def write_probabilities(path: Path, protein: Protein, probability: Tensor, least: float) -> None:
    """Write the pairs with at least probability `least` of contact, as `write_contacts`, without distances."""
    _write_pairs(path, protein, probability >= least, {"probability": (probability, 4)})


def write_scores(path: Path, protein: Protein, score: Tensor) -> None:
    """Write the pairs [r, r] with a score above 0, the mean after APC, in a table without probabilities."""
    _write_pairs(path, protein, score > 0, {"score": (score, 5)})


def _write_pairs(path: Path, protein: Protein, chosen: Tensor, numbers: Mapping[str, tuple[Tensor, int]]) -> None:
    """Write the chosen pairs [r, r], sorted by the first of their `numbers` ([r, r], digits), highest first."""
    residues = [
        (protein.chains[chain], letter, number)
        for chain, letter, number in zip(protein.asym_id, protein.sequence, protein.residue_ids)
    ]
    ranges = range_of_pairs(*(torch.from_numpy(x) for x in (protein.residue_index, protein.asym_id)))
    rows = [
        ([values[i, j].item() for values, _ in numbers.values()], i, j, name)
        for name, pairs in ranges.items()
        for i, j in (pairs & chosen).nonzero().tolist()
    ]
    rows.sort(key=lambda row: (-row[0][0], row[1:3]))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*COLUMNS, *numbers])
        for values, i, j, name in rows:
            both = [value for pair in zip(residues[i], residues[j]) for value in pair]
            texts = [f"{value:.{digits}f}" for value, (_, digits) in zip(values, numbers.values())]
            table.writerow([i, j, *both, name, *texts])
