"""Contacts from alignments alone, without a checkpoint: `infer.py --dca`, by mean-field direct coupling analysis."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from zoo.data.protein.inputs import find_proteins
from zoo.data.protein.record import Protein
from zoo.protein.coevolution import Coevolution, direct_couplings, memory_of_couplings
from zoo.protein.metrics import contact_precision
from zoo.protein.picture import write_scores
from zoo.training import UserError, user_error
from zoo.training.outputs.predicted import contact_map, log_mean, table, truth, write_files


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", help="alignments, with structures to be judged by, or folders")
    parser.add_argument("--complex", action="store_true", help="alignments without a structure are one complex")
    parser.add_argument("--out", type=Path, default=Path("dca"), help="directory for the results")
    parser.add_argument("--gaps", type=float, default=0.5, help="rows with at least this share of gaps are left out")
    parser.add_argument("--identity", type=float, default=0.8, help="rows that share this much count as one")
    parser.add_argument("--pseudocount", type=float, default=0.5, help="share of the frequencies that is uniform")


def run(options: Namespace) -> list[Path]:
    """Write three files and print a table for each protein; return the files."""
    for name in ("gaps", "identity", "pseudocount"):
        if not 0 < getattr(options, name) <= 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be above 0 and at most 1")
    proteins = user_error(find_proteins, options.files, chains=options.complex)
    if len(proteins) > 1 and not any(one.alignments for one in proteins):
        raise UserError(
            f"{len(proteins)} structures without an alignment, and couplings need one: put NAME.a3m beside NAME.cif"
        )
    written, measured, skipped = [], [], []
    for one in proteins:
        try:
            protein = user_error(one.read)
            coevolution = analyse(protein, options)
        except UserError as error:
            if len(proteins) == 1:
                raise
            skipped.append(str(error))
            print(f"skipped {error}", flush=True)
            continue
        files, precision = write(options.out, protein, coevolution)
        written += files
        measured.append(precision)
        size = memory_of_couplings(len(protein)) / 2**30
        title = (
            f"{protein.name}: {len(protein)} residues, {coevolution.rows} of {len(protein.msa)} rows, which count as"
        )
        print(table(f"{title} {coevolution.effective:.0f}, {size:.2f} GiB", precision), flush=True)
    if not written:
        raise UserError(f"none of {len(proteins)} proteins has couplings; the first: {skipped[0]}")
    if len(measured) > 1:
        log_mean(measured)
    return written


def analyse(protein: Protein, options: Namespace) -> Coevolution:
    if len(protein.msa) < 2:
        raise UserError(f"{protein.name} has only its sequence, and couplings need an alignment: give one")
    chosen = {name: getattr(options, name) for name in ("gaps", "identity", "pseudocount")}
    try:
        coevolution = direct_couplings(torch.from_numpy(protein.msa), **chosen)
    except torch.linalg.LinAlgError as error:
        raise UserError(f"{protein.name}: its couplings are not determined: raise --pseudocount") from error
    except (MemoryError, RuntimeError) as error:
        size = memory_of_couplings(len(protein)) / 2**30
        raise UserError(f"{protein.name}: {len(protein)} residues take {size:.1f} GiB: {error}") from error
    if coevolution.rows < 2:
        raise UserError(f"{protein.name}: no row but the first has less than {options.gaps:.0%} gaps: raise --gaps")
    return coevolution


def write(directory: Path, protein: Protein, coevolution: Coevolution) -> tuple[list[Path], dict[str, float]]:
    """Write NAME.csv, NAME.npz and NAME.png; return them, and the precision if the structure is known."""
    score = coevolution.score
    precision = contact_precision(score, *truth(protein))
    strength = (score / score.max().clamp(min=1e-30)).clamp(min=0)  # 0 to 1, for the picture
    files = write_files(
        directory / protein.name, protein, {"score": score.numpy()},
        lambda path: write_scores(path, protein, score), contact_map(protein, strength, precision, ", DCA"),
    )  # fmt: skip
    return files, precision
