"""Do the clips that a trained model draws show the digits that were asked for?

    python benchmarks/models/digit_recognition.py runs/demo [--clips 100] [--guidance 3] [--steps 20] [--out FILE]
    dsp-launch --nproc-per-node 2 benchmarks/models/digit_recognition.py runs/demo

A classifier that has seen only real digits in motion, frames as the run's data set draws them, is asked about every
frame of sampled clips, as many of each class. Reported are the shares of frames, of clips by the vote of their frames,
and of clips in every frame, that it recognises as the digit asked for, and the share of clips whose frames agree,
whatever on. Beside them stand the same of real clips of digits it has not seen, the most to be hoped for, and of noise.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import infer
from zoo.data.digits import MovingDigits
from zoo.training import UserError, ranks
from zoo.training import config as cfg
from zoo.video.metrics import FrameProbe

FIT_CLIPS = 6_000  # one frame of each: the frames of a clip are too much alike
REAL_CLIPS = 297  # each held-out image once


class Recogniser(FrameProbe):
    """A support vector machine on pixels, fitted to frames of clips of a data set's training images."""

    def __init__(self, data: MovingDigits, clips: int):
        n, t = len(data), data.frames
        super().__init__(data.clip(i % n, i // n, range(i % t, i % t + 1)) for i in range(clips))


@dataclass
class Score:
    """Shares recognised: of frames, of clips by vote, of clips in every frame; of clips that agree; of each class."""

    frames: float
    clips: float
    every_frame: float
    agree: float
    classes: list[float]

    @classmethod
    def of(cls, seen: Tensor, labels: Tensor) -> "Score":
        """`seen` (b t) as the classifier gives it, for clips of `labels` (b)."""
        right = (seen == labels[:, None]).double()
        return cls(
            frames=right.mean().item(),
            clips=(seen.mode(1).values == labels).double().mean().item(),
            every_frame=right.all(1).double().mean().item(),
            agree=(seen == seen[:, :1]).all(1).double().mean().item(),
            classes=[right[labels == k].mean().item() for k in range(10)],
        )


def real_clips(data: MovingDigits, count: int) -> tuple[Tensor, Tensor]:
    made = [data.clip(i % len(data), i // len(data)) for i in range(count)]
    return torch.stack([clip["x"] for clip in made]), torch.tensor([clip["label"] for clip in made])


def sampled_clips(path: Path, options: argparse.Namespace) -> tuple[cfg.Config, Tensor] | None:
    """The configuration and clips (b 1 t h w) as a run shows them, of class 0, 1, ... in turn; None but on rank 0."""
    run, directory, step = infer.locate(path)
    config = cfg.load([str(run / "config.yaml")])
    if config.data.name != "digits":
        raise UserError(f"{run} was trained on data.name={config.data.name}, and this benchmark reads digits")
    changed = {key: value for key in ("steps", "guidance") if (value := getattr(options, key)) is not None}
    config.sample = replace(config.sample, clips=options.clips, **changed)
    with ranks.process_group() as device:
        task: Any = cfg.create_task(config)
        model = infer.load_model(task, directory, step, device)
        if task.num_classes is None:
            raise UserError(f"{run}: its model is not told which digit to draw")
        task.open()
        samples = cfg.create_show(task).sample(model, device, infer.progress()).samples
        return (config, samples / 127.5 - 1) if samples is not None else None


def judge(config: Any, clips: Tensor) -> dict[str, Any]:
    """{what: Score} of the sampled clips, of real ones and of noise, as plain numbers."""
    data = config.data
    shape = {"frames": data.frames, "size": (data.height, data.width), "digit": data.digit, "speed": tuple(data.speed)}
    recognise = Recogniser(MovingDigits("train", **shape), FIT_CLIPS)
    real, real_labels = real_clips(MovingDigits("validation", **shape), REAL_CLIPS)
    asked = torch.arange(len(clips)) % 10
    noise = torch.randn(clips.shape, generator=torch.Generator().manual_seed(0))
    shown = {"sampled": (clips, asked), "real, held out": (real, real_labels), "noise": (noise, asked)}
    return {name: asdict(Score.of(recognise(x), labels)) for name, (x, labels) in shown.items()}


def report(scores: dict[str, Any]) -> str:
    heads = {"frames": "frames", "clips": "clips, by vote", "every_frame": "in every frame", "agree": "frames agree"}
    lines = [f"{'recognised':16}" + "".join(f"{head:>16}" for head in heads.values()) + "   frames of class 0 to 9"]
    for name, score in scores.items():
        by_class = " ".join(f"{share:4.0%}" for share in score["classes"])
        lines.append(f"{name:16}" + "".join(f"{score[key]:16.1%}" for key in heads) + f"   {by_class}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Do sampled clips show the digits that were asked for?")
    parser.add_argument("run", type=Path, help="directory of a run on digits, or of one of its checkpoints")
    parser.add_argument("--clips", type=int, default=100, help="clips to sample, of class 0, 1, ... in turn")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance; as configured if not given")
    parser.add_argument("--steps", type=int, help="sampling steps; as configured if not given")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    if options.clips < 10 or options.clips % 10:
        parser.error(f"--clips {options.clips}: ten classes take a multiple of 10")
    try:
        sampled = sampled_clips(options.run, options)
    except UserError as error:
        ranks.complain(error)
        return 2
    if sampled is None:
        return 0
    config, clips = sampled
    scores, sample = judge(config, clips), config.sample
    print(f"{len(clips)} clips of {config.data.frames} frames, {sample.steps} steps, guidance {sample.guidance:g}\n")
    print(report(scores))
    if options.out:
        settings = {"clips": len(clips), "steps": sample.steps, "guidance": sample.guidance}
        options.out.write_text(json.dumps({**settings, **scores}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
