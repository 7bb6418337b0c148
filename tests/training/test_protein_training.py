"""The protein task in the trainer: its data sets, its errors, its records."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.tensor import DTensor

from tests.support.inference import infer
from tests.support.paths import ROOT, STRUCTURES
from tests.support.runs import one_of
from tests.support.slow import long, slow
from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import draw
from zoo.data.protein.synthetic import PottsFamilies
from zoo.protein.coevolution import coupling_feature
from zoo.training import config as cfg
from zoo.training import tracking
from zoo.training.task_lookup import create_task

TINY = """
model: {name: evoformer, size: test, overrides: {bins: 64, extra_depth: 0, depth: 1}}
data: {name: protein_synthetic, residues: 17, rows: 5, families: 6, depth: 8}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 4, batch: 2}
eval: {every: 2, proteins: 4, baselines: true}
sample: {every: 4, proteins: 3, drawn: 2}
log: {every: 1}
checkpoint: {every: 2}
wandb: {mode: disabled}
"""


@pytest.fixture
def run(trainer, tmp_path):
    def start(*overrides, expect=0, **sections):
        lines = [line for line in TINY.splitlines() if line.split(":")[0] not in sections]
        lines += [f"{name}: {text}" for name, text in sections.items()]
        (tmp_path / "tiny.yaml").write_text("\n".join(lines))
        arguments = [str(tmp_path / "tiny.yaml"), f"runs_dir={tmp_path / 'runs'}", *overrides]
        assert trainer.main(arguments) == expect
        name = next((o[5:] for o in overrides if o.startswith("name=")), "tiny")
        return tracking.read_metrics(tmp_path / "runs" / name / "metrics.jsonl")

    return start


@pytest.mark.slow
def test_a_run_judges_contacts_and_draws_them(run, tmp_path, capsys):
    records = run()
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 4
    assert all(6 < loss < 9 for loss in losses)  # 2 log 23 + 0.3 log 64 = 7.52
    (judged,) = (record for record in records if "val_masked_accuracy" in record)
    assert judged["step"] == 4
    assert 0 <= judged["val_short_p_at_l5"] <= 1
    assert 0 < judged["val_lddt_cb"] < 1
    assert 0 < judged["val_lddt_ca"] < 1
    baselines = {key: value for record in records for key, value in record.items() if key.startswith("baseline_")}
    assert 4 < baselines["baseline_frequency"] < 12
    assert (
        baselines["baseline_frequency_loss_msa"] + baselines["baseline_frequency_loss_distogram"]
        == baselines["baseline_frequency"]
    )
    for name in ("baseline_apc_short_p_at_l5", "baseline_dca_short_p_at_l5", "baseline_frequency_short_p_at_l5"):
        assert 0 <= baselines[name] <= 1
    assert 0 < baselines["baseline_frequency_lddt_ca"] < 1
    out = capsys.readouterr().out
    assert "step 4: short P@L/5 " in out
    assert "frequencies of letters in a column, of distances by separation" in out
    with Image.open(tmp_path / "runs" / "tiny" / "samples" / "step-00000004.png") as image:
        assert image.width > 800


@pytest.mark.slow
def test_real_structures(run, capsys):
    records = run("name=real", data="{name: protein_embedded, residues: 30, crop: spatial}")
    values = {key: value for record in records for key, value in record.items()}
    assert "alignments of one row: nothing is coupled" in capsys.readouterr().out
    assert not any("baseline_apc" in key or "baseline_dca" in key or "accuracy" in key for key in values)
    assert values["baseline_frequency_loss_msa"] == 0  # the sequence tells the letters that are hidden in it
    assert values["baseline_frequency"] == values["baseline_frequency_loss_distogram"] > 0.5


@pytest.mark.slow
def test_a_folder_with_templates_is_trained_on_and_predicted(run, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path / "data")
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path / "data" / "1A8O.template1.cif.gz")
    data = f"{{name: protein_folder, path: {tmp_path / 'data'}, residues: 20, rows: 1, templates: 2}}"
    model = "{name: pairformer, size: test, overrides: {bins: 64, depth: 1, msa_depth: 1, templates: 1}}"
    records = run(model=model, data=data, sample="{every: 0}", eval="{every: 0}")
    assert sum("loss" in record for record in records) == 4
    found = {}
    for name in ("with", "without"):
        assert infer(tmp_path / "runs/tiny", tmp_path / "data", "--out", tmp_path / name) == 0
        with np.load(tmp_path / name / "1A8O.npz") as stored:
            found[name] = stored["distance"]
        (tmp_path / "data" / "1A8O.template1.cif.gz").unlink(missing_ok=True)
    assert np.abs(found["with"] - found["without"]).max() > 1e-5
    capsys.readouterr()
    run("name=none", data=data, expect=2)
    assert "data.templates=2, and the model reads none" in capsys.readouterr().err
    run("name=asks", "data.templates=0", model=model, data=data, expect=2)
    assert "the model reads templates: set data.templates" in capsys.readouterr().err


def test_a_folder(run, tmp_path, capsys):
    for name in ("1A8O.cif.gz", "2BEG.pdb.gz", "1LCD.pdb.gz"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / "structures" / name, tmp_path / "data" / name)
    (tmp_path / "data" / "broken.cif").write_text("data_x\n")
    run(data=f"{{name: protein_folder, path: {tmp_path / 'data'}, residues: 20, rows: 3, validation: 0.3}}")
    captured = capsys.readouterr()
    assert "broken.cif: it has no _atom_site table" in captured.out + captured.err
    names = json.loads((tmp_path / "runs/tiny/names.json").read_text())
    assert sorted(names["train"] + names["validation"]) == ["1A8O", "1LCD", "2BEG"]
    assert f"1 held out: {names['validation'][0]}\n" in captured.out
    run("name=absent", data="{name: protein_folder, path: /nowhere}", expect=2)
    assert "data: no such folder: /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.overrides.bins=8"], "64 bins of distance and the model 8: set model.overrides.bins=64"),
        (["model.overrides.extra_depth=1"], "set data.extra_rows, or model.overrides.extra_depth=0"),
        (["data.extra_rows=2"], "the model has no extra alignment: set data.extra_rows=0"),
        (["data.residues=4000"], "data: no embedded structure has 4000 residues"),
        (["data.residues=4"], "data.residues=4: must be at least 8"),
        (["data.couplings=true"], "has 1 couplings of each pair and the model takes 0: set model.overrides.coupl"),
        (["objective.recycles=-1"], "objective.recycles=-1: must be at least 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, capsys, overrides, message):
    run(*overrides, expect=2)
    assert message in capsys.readouterr().err


def test_a_model_of_something_else_is_refused(run, capsys):
    run(expect=2, model="{name: latte, size: test}")
    assert "model latte is not a model of proteins: its inputs are x" in capsys.readouterr().err


def task(rank=0, size=1, **data):
    config = cfg.defaults("protein_embedded")
    config.model.name, config.model.size = "evoformer", "test"
    config.model.overrides = {"bins": 64, "extra_depth": 0}
    config.train.batch, config.eval.proteins = 2, 4
    for key, value in {"residues": 21, "rows": 3, **data}.items():
        setattr(config.data, key, value)
    made = create_task(config, one_of(size, rank))
    made.train, made.validation = EmbeddedProteins("train"), EmbeddedProteins("validation")
    return made


def test_parts_are_those_of_the_whole_and_no_rank_has_all_pairs():
    whole = task().batch(None, 3, 0, 1, 2)
    parts = [task(rank, 4).batch(None, 3, 0, 1, 2) for rank in range(4)]
    for name, value in whole.items():
        if isinstance(value, int):
            assert all(part[name] == value for part in parts)
            continue
        if not isinstance(parts[0][name], DTensor):
            assert all(torch.equal(part[name], value) for part in parts)
            continue
        assert torch.equal(torch.cat([part[name].to_local() for part in parts], 1), value)
        assert {part[name].shape for part in parts} == {value.shape}
    assert [part["bins"].to_local().shape for part in parts] == [(2, 6, 21)] * 3 + [(2, 3, 21)]
    example = task().example(None)
    assert example.keys() == whole.keys()
    for name, value in whole.items():
        if isinstance(value, int):
            assert example[name] == value
            continue
        assert (example[name].shape, example[name].dtype) == (value.shape, value.dtype), name


def test_couplings_are_told_by_rows_of_pairs():
    made = [task(couplings=True), *(task(rank, 4, couplings=True) for rank in range(4))]
    for one in made:
        one.train = PottsFamilies("train", families=6, residues=17, rows=30, kinds=True)
    whole, *parts = (one.batch(None, 3, 0, 1, 2)["couplings"] for one in made)
    assert [part.to_local().shape for part in parts] == [(2, 6, 21, 1)] * 3 + [(2, 3, 21, 1)]
    assert torch.equal(torch.cat([part.to_local() for part in parts], 1), whole)
    assert torch.equal(whole, whole.transpose(1, 2))
    assert (whole[:, 17:] == 0).all()
    assert whole.std() > 0.3
    family = made[0].train.protein(2)
    told = made[0].with_couplings(family, "any").take(np.arange(3, 9)).couplings  # of the whole alignment, then cut
    np.testing.assert_array_equal(told, coupling_feature(torch.from_numpy(family.msa)).numpy()[3:9, 3:9])


def test_couplings_of_the_pairs_around():
    """Told by rows too; none where a chain ends, or residues between were cut out."""
    protein = replace(
        PottsFamilies("train", families=1, residues=9, rows=2).protein(0), asym_id=np.repeat([0, 1], [5, 4])
    )
    protein = replace(protein, residue_index=np.array([0, 1, 2, 4, 5, 0, 1, 2, 3]))
    score = np.arange(81, dtype=np.float32).reshape(9, 9) + 1
    example = draw(replace(protein, couplings=score), 0, residues=11, rows=2)
    whole = example.couplings(around=1)["couplings"]
    assert whole.shape == (11, 11, 9)
    place, chain = protein.residue_index, protein.asym_id
    for i, j, k in itertools.product(range(11), range(11), range(9)):
        there = [(i, i + k // 3 - 1), (j, j + k % 3 - 1)]
        near = all(max(a, b) < 9 and b >= 0 and place[b] - place[a] == b - a and chain[a] == chain[b] for a, b in there)
        assert whole[i, j, k] == (score[there[0][1], there[1][1]] if near else 0)
    for rows in (range(2, 7), range(7, 11), range(11, 11)):
        assert torch.equal(example.couplings(rows, around=1)["couplings"], whole[rows.start : rows.stop])
    assert torch.equal(example.couplings()["couplings"], whole[..., 4:5])


@pytest.mark.long
def test_a_model_that_is_told_couplings_beats_them(trainer, tmp_path):
    """configs/couplings_demo.yaml in little, on families of structures that it never saw."""
    little = ["data={residues: 64, families: 64, depth: 256}", "train={steps: 200}", "eval.every=200"]
    options = [*little, "sample={every: 200, drawn: 1}", "wandb.mode=disabled", f"runs_dir={tmp_path}"]
    assert trainer.main([str(ROOT / "configs/couplings_demo.yaml"), *options]) == 0
    records = tracking.read_metrics(tmp_path / "couplings_demo/metrics.jsonl")
    found = {name: value for record in records for name, value in record.items()}
    for name in ("medium_p_at_l", "long_p_at_l"):
        assert found[f"val_{name}"] > 1.1 * found[f"baseline_dca_{name}"], name


def test_a_single_row_is_not_divided():
    whole, part = task(rows=1).batch(None, 3, 0, 1, 2), task(3, 4, rows=1).batch(None, 3, 0, 1, 2)
    for name in ("msa", "deletions", "msa_mask", "msa_target", "msa_weight"):
        assert torch.equal(whole[name], part[name])
        assert part[name].shape == (2, 1, 21)


def test_validation_is_the_same_for_any_number_of_groups():
    def loss_inputs(groups):
        batches = [list(task().validation_batches(None, group, groups)) for group in range(groups)]
        rows = [part["bins"][i] for of_group in batches for _, n, part in of_group for i in range(n)]
        return sorted(row.sum().item() for row in rows)

    assert loss_inputs(1) == loss_inputs(2)
    chosen = task().validation_examples(40)  # more than there are: other crops of the same
    assert len({example().protein.name for example in chosen}) == len(EmbeddedProteins("validation"))


def test_a_step_draws_its_recycled_passes():
    def drawn(greatest, seed=0):
        made = task()
        made.config.objective.recycles, made.config.train.seed = greatest, seed
        return made, [made.recycles(step) for step in range(1, 401)]

    made, passes = drawn(3)
    assert all(80 < passes.count(n) < 120 for n in range(4))
    assert passes == drawn(3)[1] != drawn(3, seed=1)[1]
    assert set(drawn(0)[1]) == {0}
    made.config.train.accumulation = 2
    batches = [made.batch(None, 7, micro, group, 2) for micro in range(2) for group in range(2)]
    assert {batch["recycles"] for batch in batches} == {made.recycles(7)}  # no group waits for another
    assert {part["recycles"] for *_, part in made.validation_batches(None, 0, 1)} == {3}
    assert made.example(None)["recycles"] == 3
    assert made.example(None, made.bucket(7, 2))["recycles"] == made.recycles(7)


@pytest.mark.parametrize("kept", [long("none"), slow("both")])
def test_passes_without_gradient_keep_nothing(run, capsys, kept):
    def activations(*overrides):
        run("dry_run=true", *overrides)
        out = capsys.readouterr().out
        return out, next(line.split()[1:3] for line in out.splitlines() if line.startswith("  activations"))

    out, few = activations("objective.recycles=1", f"train.checkpoint_activations={kept}")
    assert "5 rows of 17 residues, 1 recycled pass (a step draws 0 to 1)" in out
    assert activations("objective.recycles=3", f"train.checkpoint_activations={kept}")[1] == few
