"""The image task: its data, the histograms that a model has to beat, a short run, what errors say."""

import math

import pytest
import torch
from PIL import Image

import zoo
from tests.support.inference import infer, infer_here
from tests.support.runs import Runs, metrics
from zoo.data.digits import DigitImages, MovingDigits
from zoo.image.histogram import neighbour_bits, pixel_bits
from zoo.pictures import save_png
from zoo.training import UserError
from zoo.training import config as cfg
from zoo.training.task_lookup import create_task

CONFIG = """
model: {name: axial_image, size: test, overrides: {height: 8, width: 8, levels: 17, num_classes: 10, dropout: 0.1}}
data: {name: digit_images}
train: {steps: 4, batch: 2}
eval: {every: 4, images: 6, baselines: true}
sample: {every: 4, images: 3}
log: {every: 1}
"""
BASELINES = ("baseline_pixel", "baseline_neighbour")


def test_digit_images_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    truth, data = load_digits(), DigitImages("validation")
    for index in (0, 7, len(data) - 1):
        image, label = data.image(index)
        assert image.shape == data.shape
        assert image.dtype == torch.int64
        assert torch.equal(image[0], torch.from_numpy(truth.images[data.samples[index]]).long())
        assert label == truth.target[data.samples[index]]
        assert torch.equal(data.image(index, range(2, 5))[0], image[:, 2:5])
        assert data.image(index, range(8, 8))[0].shape == (1, 0, 8)
    assert max(data.image(i)[0].max() for i in range(20)) == data.levels - 1
    assert data.samples == MovingDigits("validation").samples
    assert not set(data.samples) & set(DigitImages("train").samples)


def test_histograms_know_what_can_be_known():
    """Images in which a row of fair coins is repeated."""
    torch.manual_seed(0)
    images = torch.randint(2, (4000, 1, 1, 6)).expand(-1, 1, 5, -1)
    train, judged = images[:3000], images[3000:]
    assert pixel_bits(train, judged, 2) == pytest.approx(1, abs=0.01)
    # the first row has nothing above it; elsewhere the value above tells, as far as a histogram of all rows can say
    assert 0.2 < neighbour_bits(train, judged, 2) < 0.8
    fixed = torch.arange(30).view(1, 1, 5, 6).expand(3000, 1, 5, 6) % 3
    assert pixel_bits(fixed, fixed[:10], 3) < 0.001
    assert pixel_bits(train, 1 - train, 2) < pixel_bits(torch.zeros_like(train), judged, 2) < math.inf


def test_a_grid_of_images(tmp_path):
    images = torch.linspace(0, 1, 6)[:, None, None, None].expand(6, 1, 8, 8)
    save_png(tmp_path / "grid.png", images, columns=3)
    with Image.open(tmp_path / "grid.png") as grid:
        assert (grid.size, grid.mode) == ((64 * 3 + 4, 64 * 2 + 2), "L")
        assert [grid.getpixel((33 + 66 * i, 33 + 66 * j)) for j in range(2) for i in range(3)] == [
            0, 51, 102, 153, 204, 255,
        ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]
    with pytest.raises(ValueError, match="expected images"):
        save_png(tmp_path / "grid.png", images.expand(-1, 2, -1, -1))


def test_a_run_and_its_samples(trainer, tmp_path, whole_world, capsys):
    run = Runs(trainer, tmp_path, CONFIG, "image.yaml")("name=image", "wandb.mode=disabled")
    assert metrics(run, "loss")[1] == pytest.approx((math.log2(17),), rel=1e-3)  # all levels alike at first
    assert all(2 < loss < math.log2(17) for key in BASELINES for loss in metrics(run, key)[4])
    assert (run / "samples" / "step-00000004.png").is_file()
    options = ["--label", 3, 7]
    assert infer(run, *options, "--out", tmp_path / "one") == 0
    whole_world(infer_here, 2, (run, *options, "--out", tmp_path / "two"))
    assert (tmp_path / "one/seed-0.png").read_bytes() == (tmp_path / "two/seed-0.png").read_bytes()
    capsys.readouterr()
    assert infer(run, "--label", 12, "--out", tmp_path) == 2
    assert "--label 12: the classes are 0 to 9" in capsys.readouterr().err
    assert infer(run, "--images", 0, "--out", tmp_path) == 2
    assert "--images 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.overrides.levels=16"], r"the data has 17 levels and the model 16: set model\.overrides\.levels=17"),
        (["model.overrides.channels=3"], r"the data has 1 channels and the model 3"),
        (["model.overrides.height=7"], r"the images are 8 x 8: set model\.overrides\.height and width"),
        (["model.overrides.num_classes=3"], r"the data has 10 classes and the model 3"),
        (["eval.images=298"], r"eval\.images=298: the validation set has 297"),
    ],
)
def test_models_that_do_not_fit_the_data_are_refused(tmp_path, overrides, message):
    (tmp_path / "image.yaml").write_text(CONFIG)
    task = create_task(cfg.load([str(tmp_path / "image.yaml"), *overrides]))
    with pytest.raises(UserError, match=message):
        task.model()
        task.open()


def test_a_dry_run(trainer, tmp_path, capsys):
    (tmp_path / "image.yaml").write_text(CONFIG)
    assert trainer.main([str(tmp_path / "image.yaml"), "dry_run=true", "parallel.sp=2"]) == 0
    assert "in model.outer.*.row" in capsys.readouterr().out


def test_other_models_are_refused(tmp_path):
    (tmp_path / "image.yaml").write_text("model: {name: latte, size: test}\ndata: {name: digit_images}\n")
    with pytest.raises(UserError, match="latte is not an autoregressive model of images"):
        create_task(cfg.load([str(tmp_path / "image.yaml")])).model()
    assert "axial_image" in zoo.list_models()
