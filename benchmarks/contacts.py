"""Contacts of proteins whose structure is known: mutual information, direct couplings, and models told of couplings.

    python benchmarks/contacts.py FOLDER runs/seed0 runs/seed1 ... [--draw NAME] [--out docs/images/contacts.png]

    git clone https://github.com/Kortemme-Lab/covariation && python benchmarks/contacts.py FOLDER --pfam covariation

FOLDER holds structures and alignments. Prints long-range precision (P@L, P@L/2, P@L/5) of every protein, the mean over
proteins, and over runs with the standard deviation of their means. Of one protein the four maps are drawn, the model
being that of the first run.

`--pfam` fills FOLDER with forty domains of Pfam that have a structure each, from the data of Ollikainen and Kortemme
(PLoS Comput Biol 2013, 9:e1003313), MIT: `analysis/natural_alignments`, alignments in which no two rows share 80%;
`analysis/domain_sequences.txt`, a chain of the PDB in the columns of each; `input/domains`, that chain. Of it the
residues that stand in a column are written, `NAME.pdb` and `NAME.a3m`.
"""

import argparse
import sys
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from Bio.Data.PDBData import protein_letters_3to1_extended as LETTER
from PIL import Image
from torch import Tensor

import zoo
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.record import Protein
from zoo.protein.coevolution import direct_couplings, filled_rows, mutual_information, relative
from zoo.protein.metrics import contact_precision
from zoo.protein.picture import ContactMap
from zoo.training.outputs.protein import ROWS, truth

PARTS = ("L", "L/2", "L/5")


def untrained(protein: Protein) -> dict[str, Tensor]:
    """Scores [r, r] that take no training."""
    msa = torch.from_numpy(protein.msa)
    return {
        "mutual information": mutual_information(msa),
        "of rows with few gaps": mutual_information(filled_rows(msa)),
        "direct couplings of these": direct_couplings(msa).score,
    }


def long_range(protein: Protein, score: Tensor) -> Tensor:
    precision = contact_precision(score, *truth(protein))
    return torch.tensor([precision[f"long P@{part}"] for part in PARTS])


def words(precision: Tensor) -> str:
    return ", ".join(f"{value:.3f}" for value in precision.tolist())


def tabulate(results: dict[str, dict[str, Tensor]]) -> None:
    """Precisions of every protein by every way; the models are the last."""
    first = next(iter(results.values()))
    means = {way: torch.stack([precisions[way] for precisions in results.values()]).mean(0) for way in first}
    for way, mean in means.items():
        print(f"{way:<26}", *(f"{name} {words(results[name][way])} " for name in results), "mean", words(mean))
    models = [way for way in first if way.startswith("model")]
    for name, precisions in results.items():
        print(f"{name}, mean of the runs: {words(torch.stack([precisions[way] for way in models]).mean(0))}")
    of_runs = torch.stack([means[way] for way in models])
    spread = words(of_runs.std(0)) if len(models) > 1 else "of one run"
    print(f"mean of all: {words(of_runs.mean(0))}; standard deviation of the runs' means: {spread}")


def draw(protein: Protein, scores: dict[str, Tensor], out: Path) -> None:
    """The maps of all scores, two in a row, at half their size."""
    maps = []
    for name, score in scores.items():
        strength = (score / score.max().clamp(min=1e-30)).clamp(min=0)
        title = f"{protein.name}, {name}: long P@L {long_range(protein, score)[0]:.2f}"
        maps.append(ContactMap(title, strength, *truth(protein)).draw())
    width, height = maps[0].size
    whole = Image.new("RGB", (2 * width, -(-len(maps) // 2) * height), (255, 255, 255))
    for i, image in enumerate(maps):
        whole.paste(image, (i % 2 * width, i // 2 * height))
    half = whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)
    half.quantize(256, Image.Quantize.MAXCOVERAGE).save(out)


def chain(path: Path) -> dict[str, list[str]]:
    """Lines of a PDB file by residue, one letter and its number: {"M 12A": [...], ...}."""
    residues: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith(("ATOM", "HETATM")) and line[17:20] in LETTER:
            residues.setdefault(f"{LETTER[line[17:20]]} {line[22:27]}", []).append(line)
    return residues


def rows_of(path: Path) -> list[str]:
    parts = path.read_text().split(">")[1:]
    return ["".join(part.split("\n")[1:]).upper().replace(".", "-") for part in parts]


def domains(checkout: Path, out: Path) -> None:
    """The files of the forty domains."""
    out.mkdir(parents=True, exist_ok=True)
    for line in (checkout / "analysis/domain_sequences.txt").read_text().splitlines():
        name, pdb, query = line.split()
        alignment = checkout / f"analysis/natural_alignments/{name}.align.80"
        structures = list((checkout / f"input/domains/{name}").glob("*.pdb"))
        if not alignment.exists() or not structures:
            continue
        residues = chain(structures[0])
        columns = [i for i, letter in enumerate(query) if letter != "-"]
        letters = "".join(query[i] for i in columns)
        chain_letters = "".join(key[0] for key in residues)
        blocks = SequenceMatcher(None, letters, chain_letters, autojunk=False).get_matching_blocks()
        pairs = [(columns[block.a + k], list(residues)[block.b + k]) for block in blocks for k in range(block.size)]
        lines = [line for _, residue in pairs for line in residues[residue]]
        (out / f"{name}.pdb").write_text("\n".join([*lines, "END", ""]))
        texts = ["".join(row[i] for i, _ in pairs) for row in [query, *rows_of(alignment)]]
        (out / f"{name}.a3m").write_text("".join(f">{i}\n{text}\n" for i, text in enumerate(texts)))
        print(f"{name} {pdb}: {len(pairs)} residues, {len(texts)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--pfam", type=Path, help="a checkout of the data")
    parser.add_argument("--draw", help="the protein of the picture; the first, if not said")
    parser.add_argument("--out", type=Path, default=Path("contacts.png"))
    options = parser.parse_args()
    if options.pfam:
        return domains(options.pfam, options.folder)
    folder = ProteinFolder(options.folder)
    proteins = {name: folder.protein(i) for i, name in enumerate(folder.names)}
    scores = {name: untrained(protein) for name, protein in proteins.items()}
    for path in options.runs:
        run, asked = zoo.load(path), argparse.ArgumentParser()
        run.infer.arguments(asked)
        defaults = asked.parse_args([str(options.folder)])
        for name, protein in proteins.items():
            query = replace(protein, couplings=relative(scores[name]["direct couplings of these"]).numpy())
            predicted = run.infer.predict(run.model, query, min(ROWS, len(protein.msa)), defaults, run.device)
            scores[name][f"model, {path.name}"] = predicted.contact
        run.close()

    tabulate({name: {way: long_range(proteins[name], s) for way, s in of.items()} for name, of in scores.items()})
    drawn = options.draw or next(iter(proteins))
    draw(proteins[drawn], {way.split(",")[0]: scores[drawn][way] for way in list(scores[drawn])[:4]}, options.out)


if __name__ == "__main__":
    main()
