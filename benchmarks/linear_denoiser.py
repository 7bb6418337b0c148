"""The loss of the best linear denoiser on a run's data: the baseline of the demo's validation loss.

    python benchmarks/linear_denoiser.py configs/demo.yaml [key=value ...] [clips=40000]

Fits three to `clips` training clips and prints their losses on the validation clips of the run, at the noise levels of
its validation: one that does not know the class, one with a mean for every class (this is what `eval.linear_floor`
prints in a run), and one with a covariance for every class too, the strongest that is linear once the class is known.
No noise is drawn: the expectation over it is exact, see zoo/video/linear_denoiser.py.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo.data.digits import MovingDigits
from zoo.data.sampling import order
from zoo.training import UserError, config
from zoo.video.diffusion import RectifiedFlow
from zoo.video.linear_denoiser import fit_linear_denoiser


def clips(data: MovingDigits, samples: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The clips (n c t h w) and labels (n) of (index, epoch) pairs."""
    made = [data.clip(index, epoch) for index, epoch in samples]
    return torch.stack([clip["x"] for clip in made]), torch.tensor([clip["label"] for clip in made])


def main(arguments: list[str]) -> None:
    count = next((int(a.removeprefix("clips=")) for a in arguments if a.startswith("clips=")), 40_000)
    options = config.load([a for a in arguments if not a.startswith("clips=")])
    data = options.data
    if data.name != "digits" or options.objective.name != "rectified_flow":
        raise UserError("the linear denoiser is fitted to data.name=digits with objective.name=rectified_flow")
    shape = {"frames": data.frames, "size": (data.height, data.width), "digit": data.digit, "speed": tuple(data.speed)}
    train, validation = MovingDigits("train", seed=options.train.seed, **shape), MovingDigits("validation", **shape)
    chosen = order(0, 0, len(validation))[: options.eval.clips].tolist()
    x, labels = clips(train, [(i % len(train), i // len(train)) for i in range(count)])
    held_out, its_labels = clips(validation, [(i, 0) for i in chosen])
    levels = RectifiedFlow(nn.Identity()).validation_levels(options.eval.levels)

    print(f"{count} training clips of {x[0].numel()} pixels, {len(chosen)} validation clips")
    print("noise level".ljust(18) + "".join(f"{u:8.3f}" for u in levels.tolist()) + "    mean")
    for name, known, covariance in (
        ("class unknown", None, "shared"),
        ("class means", labels, "shared"),
        ("class covariances", labels, "class"),
    ):
        loss = fit_linear_denoiser(x, known, covariance=covariance).loss(held_out, levels, its_labels)
        print(name.ljust(18) + "".join(f"{value:8.4f}" for value in loss.tolist()) + f"{loss.mean():8.4f}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
