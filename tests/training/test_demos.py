"""The demo of every model of the zoo, three steps of it on two ranks; one of each task also alone, and resumed."""

import pytest

import zoo
from tests.support.paths import ROOT
from tests.support.runs import Runs, alike, metrics, run_here, stop_at
from tests.support.slow import long, slow
from zoo.training import config as cfg

DEMOS = sorted(path for path in (ROOT / "configs").glob("*demo.yaml"))
SHORT = ["train.steps=3", "log.every=1", "checkpoint.every=0", "wandb.mode=disabled"]
SHORT_TASK = {  # the rest of a demo, in little
    "digit_images": ["train.batch=4", "eval={every: 3, images: 4, baselines: false}", "sample.every=0"],
    "digits": ["train.batch=4", "eval={every: 3, clips: 4, levels: 1, linear_baseline: false}", "sample.every=0"],
    "protein_synthetic": [
        "data={residues: 13, rows: 5, families: 6, depth: 8}",
        "train.batch=4",
        "eval={every: 3, proteins: 4, baselines: false}",
        "sample={every: 3, proteins: 2}",
    ],
    "protein_embedded": [
        "data={residues: 13, rows: 1}",
        "train.batch=4",
        "eval={every: 3, proteins: 4, baselines: false}",
        "sample={every: 3, proteins: 2}",
    ],
}  # fmt: skip


SHARED = {"demo", "axial_demo", "protein_demo"}  # one of each task: on two ranks its losses are those of one


class Demo(Runs):
    def __init__(self, trainer, directory, path):
        self.trainer, self.directory, self.file = trainer, directory, path
        self.data = cfg.load([str(path)]).data.name

    def arguments(self, *overrides):
        return super().arguments(*SHORT, *SHORT_TASK[self.data], *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        stem if stem == "demo" else (slow if stem in SHARED | {"latte_demo"} else long)(stem)
        for stem in (path.stem for path in DEMOS)
    ],
)
def test_a_demo(trainer, tmp_path, whole_world, monkeypatch, name):
    run = Demo(trainer, tmp_path, ROOT / f"configs/{name}.yaml")
    whole_world(run_here, 2, run.arguments("name=shared", "parallel.sp=2"))  # without a warning
    assert list(metrics(tmp_path / "runs/shared", "loss")) == [1, 2, 3]
    if name in SHARED:
        plain = run("name=plain")
        alike(plain, tmp_path / "runs/shared", tolerance=1e-4)
        with monkeypatch.context() as patch:
            stop_at(trainer, patch, 2)
            run("name=again", expect=trainer.STOPPED)
        alike(plain, run("name=again", "resume=true"), tolerance=0)  # bitwise


def test_every_model_has_a_demo():
    """Latte's is of another name; HunyuanVideo learns too little in four minutes to beat a linear denoiser."""
    assert {cfg.load([str(path)]).model.name for path in DEMOS} >= set(zoo.list_models()) - {"latte", "hunyuan"}
