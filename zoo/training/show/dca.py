"""Contacts from alignments alone, without a checkpoint: `infer.py --dca`, by mean-field direct coupling analysis."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch

from zoo.data.protein.given import find
from zoo.data.protein.record import Protein
from zoo.pictures import whole_file
from zoo.protein.coevolution import Coevolution, direct_couplings, memory_of_couplings
from zoo.protein.metrics import average, contact_precision
from zoo.protein.picture import ContactMap, save_contact_maps, write_scores
from zoo.training import UserError, user_error
from zoo.training.show.protein import truth, words


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", help="alignments, with structures to be judged by, or folders")
    parser.add_argument("--complex", action="store_true", help="alignments without a structure are one complex")
    parser.add_argument("--out", type=Path, default=Path("dca"), help="directory for the results")
    parser.add_argument("--gaps", type=float, default=0.5, help="rows with at least this share of gaps are left out")
    parser.add_argument("--identity", type=float, default=0.8, help="rows that share this much count as one")
    parser.add_argument("--pseudocount", type=float, default=0.5, help="share of the frequencies that is uniform")


def run(options: Namespace) -> list[Path]:
    """Write three files and print a line for each protein; return the files."""
    for name in ("gaps", "identity", "pseudocount"):
        if not 0 < getattr(options, name) <= 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be above 0 and at most 1")
    given = user_error(find, options.files, chains=options.complex)
    written, measured, skipped = [], [], []
    for one in given:
        try:
            protein = user_error(one.read)
            found = judge(protein, options)
        except UserError as error:
            if len(given) == 1:
                raise
            skipped.append(str(error))
            print(f"skipped {error}", flush=True)
            continue
        files, precision = write(options.out, protein, found)
        written += files
        measured.append(precision)
        print(
            f"{protein.name}: {len(protein)} residues, {found.rows} of {len(protein.msa)} rows, which count as "
            f"{found.effective:.0f}, {memory_of_couplings(len(protein)) / 2**30:.2f} GiB; {words(precision)}",
            flush=True,
        )
    if not written:
        raise UserError(f"none of {len(given)} proteins has couplings; the first: {skipped[0]}")
    if len(measured) > 1:
        print(f"mean of {len(measured)}: {words(average(measured))}")
    return written


def judge(protein: Protein, options: Namespace) -> Coevolution:
    if len(protein.msa) < 2:
        raise UserError(f"{protein.name} has only its sequence, and couplings need an alignment: give one")
    chosen = {name: getattr(options, name) for name in ("gaps", "identity", "pseudocount")}
    try:
        found = direct_couplings(torch.from_numpy(protein.msa), **chosen)
    except torch.linalg.LinAlgError as error:
        raise UserError(f"{protein.name}: its couplings are not determined: raise --pseudocount") from error
    except (MemoryError, RuntimeError) as error:
        size = memory_of_couplings(len(protein)) / 2**30
        raise UserError(f"{protein.name}: {len(protein)} residues take {size:.1f} GiB: {error}") from error
    if found.rows < 2:
        raise UserError(f"{protein.name}: no row but the first has less than {options.gaps:.0%} gaps: raise --gaps")
    return found


def write(directory: Path, protein: Protein, found: Coevolution) -> tuple[list[Path], dict[str, float]]:
    """Write NAME.csv, NAME.npz and NAME.png; return them, and the precision if the structure is known."""
    known = truth(protein)
    precision = contact_precision(found.score, *known)
    table, arrays, picture = (directory / f"{protein.name}.{suffix}" for suffix in ("csv", "npz", "png"))
    directory.mkdir(parents=True, exist_ok=True)
    write_scores(table, protein, found.score)
    with whole_file(arrays) as file:
        np.savez_compressed(
            file, allow_pickle=False, score=found.score.numpy(), sequence=np.array(protein.sequence),
            chain=np.array(protein.chains)[protein.asym_id], residue_index=protein.residue_index,
            residue_id=np.array(protein.residue_ids),
        )  # fmt: skip
    strength = (found.score / found.score.max().clamp(min=1e-30)).clamp(min=0)  # 0 to 1, for the picture
    title = ", ".join(f"{k} {v:.2f}" for k, v in precision.items() if k.endswith("P@L/2"))
    save_contact_maps(picture, [ContactMap(f"{protein.name}, DCA: {title}".removesuffix(": "), strength, *known)])
    return [table, arrays, picture], precision
