"""The pictures of a video model: clips drawn from noise, a linear denoiser as baseline; and what infer.py draws.

A training run, at intervals, draws clips with the classes or captions of real clips, and shows each under the real
one; infer.py draws what its options say. Letters: n clips, c channels, t frames, h w height and width in latent cells
(for pixels: pixels), b clips of a batch.
"""

import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.data.sampling import hash_seed, order
from zoo.data.video_file import read_frames
from zoo.pictures import GREY, need_av, save_gif, save_mp4
from zoo.training import UserError, task, user_error
from zoo.training.outputs.clips import Clips, Pixels, decode
from zoo.training.ranks import on_first_rank
from zoo.training.task import Baseline
from zoo.training.tasks.video import Task
from zoo.video.encoders import encode_start
from zoo.video.linear_denoiser import linear_denoiser_loss
from zoo.video.metrics import STATISTICS, FrameProbe, VideoFeatures, frechet_distance, statistics
from zoo.video.noise import seeded_noise

SAMPLES = hash_seed("samples")
BASELINE_CLIPS, BASELINE_SIZE = 12_000, 4096  # clips that a linear denoiser is fitted to; most values of a clip
PROBE_FRAMES = 3_000  # one of each training clip; the probe of classes is fitted to them
FPS = 8.0  # where the data does not say
FORMATS = ("gif", "mp4")


@dataclass
class Pairs:
    """Samples and their real clips, if they have any, (n c t y x) uint8, on rank 0; None elsewhere."""

    real: Tensor | None
    samples: Tensor | None
    titles: list[str]
    fps: float


class Show(task.Show):
    """Clips that the model draws, each under the real one of its class or caption."""

    media = "gif"
    probed = True  # samples are pixels, whose classes a probe can recognize
    task: Task

    def codec(self, path: Path | None, device: torch.device) -> Any:
        """The decoder of the model's clips: `Pixels`, or the autoencoder at `path` (None: where the data says)."""
        return Pixels(self.task.channels)

    def ready(self) -> None:
        if self.config.sample.metrics and self.config.sample.every:
            on_first_rank(lambda: self.features is None)  # fail now rather than hours later
        flow, size = self.config.objective.name == "rectified_flow", prod(self.task.shape) * self.task.clip[0]
        if self.config.eval.linear_baseline and not (flow and size <= BASELINE_SIZE):
            raise UserError(
                f"eval.linear_baseline needs objective.name=rectified_flow and clips of at most {BASELINE_SIZE} values"
            )

    def real(self, count: int) -> tuple[Clips, Tensor, float]:
        """Validation clips of one size, always the same: their conditions, the clips (n c t h w), frames a second."""
        places = order(0, 0, len(self.task.validation)).tolist()
        chosen = [(places[i % len(places)], i // len(places)) for i in range(count)]
        if classes := self.task.num_classes:  # one clip in turn of each class that the validation clips have
            of = {i: self.task.validation.clip(i, 0, range(0))["label"] for i in places}
            turns = [of_class for label in range(classes) if (of_class := [i for i in places if of[i] == label])]
            rounds = [(turns[i % len(turns)], i // len(turns)) for i in range(count if turns else 0)]
            chosen = [(of_class[n % len(of_class)], n // len(of_class)) for of_class, n in rounds] or chosen
        clips = [self.task.validation.clip(index, epoch) for index, epoch in chosen]
        fps = self.config.data.fps or FPS
        prepared = self.clips([clip["label"] or 0 for clip in clips], self.task.clip, fps)
        return prepared, torch.stack([clip["x"] for clip in clips]), fps

    def clips(self, labels: Sequence[int], size: tuple[int, int, int], fps: float) -> Clips:
        """Clips of these classes; the classes are not used if the model takes none."""
        label, none, classes = torch.tensor(labels), None, self.task.num_classes
        if classes is not None:
            none = self.task.conditions_of(torch.full_like(label, classes), size, fps)
        titles = ["" if classes is None else self.names[label] for label in labels]
        return Clips(size, self.task.conditions_of(label, size, fps), none, titles)

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the classes: the data's own `names`, else their numbers."""
        return getattr(self.config.data, "names", None) or [str(label) for label in range(self.task.num_classes or 0)]

    def sample(self, model: Callable[..., Tensor], device: torch.device, on_step: Callable[..., None]) -> Pairs:
        """Clips from fixed noise, with the classes or captions of real clips, and the real clips."""
        options = self.config.sample
        clips, x, fps = user_error(self.real, self.count)
        if "start" in self.task.takes and "start" not in clips.conditions:
            begin_with(clips, {"start": self.task.starts(x, range(x.shape[2]))})
        samples = self.draw(model, clips, SAMPLES, options.steps, options.guidance, device, on_step)
        codec = user_error(self.codec, None, device)
        return Pairs(decode(x, codec) if self.paired else None, decode(samples, codec), clips.titles, fps)

    @property
    def count(self) -> int:
        """The number of clips to sample."""
        return self.config.sample.clips

    @property
    def paired(self) -> bool:
        """Tell whether samples have the class or caption of a real clip."""
        return True

    def write(self, samples: Pairs, path: Path) -> Mapping[str, float]:
        assert samples.samples is not None
        settings: dict[str, Any] = {"fps": samples.fps, "columns": columns(len(samples.samples))}
        settings["titles"] = shown(samples.titles)
        if samples.real is None:
            save_gif(path, samples.samples, **settings)
            return {}
        n, c, t, _, w = samples.real.shape
        line = torch.full((n, c, t, 1, w), GREY, dtype=torch.uint8)
        pairs = torch.cat([samples.real, line, samples.samples], dim=3)
        save_gif(path, pairs, **settings, head="real clips, and under each a sample")
        return self.measure(samples.real, samples.samples, samples.titles) if self.config.sample.metrics else {}

    def measure(self, real: Tensor, samples: Tensor, titles: Sequence[str]) -> dict[str, float]:
        """The likeness of sampled clips to real ones, (n c t y x) uint8: see zoo/video/metrics.py."""
        of_real, of_samples = statistics(real), statistics(samples)
        measures = {f"{of} {name}": value for of, x in (("real", of_real), ("sample", of_samples))
                 for name, value in zip(STATISTICS, x.mean(0).tolist())}  # fmt: skip
        if len(real) > 1:
            measures["Fréchet distance of statistics"] = frechet_distance(of_real, of_samples)
        if self.features is not None and len(real) > 1:
            measures["Fréchet video distance"] = frechet_distance(self.features(real), self.features(samples))
        if self.task.num_classes and self.probed:
            labels = [self.names.index(title) for title in titles]
            shares = self.probe.shares(samples.float() / 127.5 - 1, labels)
            measures |= {f"sample {name}": value for name, value in shares.items()}
        return measures

    @cached_property
    def features(self) -> VideoFeatures | None:
        path = self.config.sample.features
        return user_error(VideoFeatures, path, prefix="sample.features: ") if path else None

    @cached_property
    def probe(self) -> FrameProbe:
        """The classifier of classes: fitted to single frames of training clips."""
        data, frames = self.task.train, self.task.clip[0]
        chosen = ((i % len(data), i // len(data), range(i % frames, i % frames + 1)) for i in range(PROBE_FRAMES))
        return FrameProbe(data.clip(*one) for one in chosen)

    def draw(
        self,
        model: Callable[..., Tensor],
        clips: Clips,
        seed: int,
        steps: int,
        guidance: float,
        device: torch.device,
        on_step: Callable[..., None],
    ) -> Tensor:
        """Latents (n c t h w) on the CPU, from noise that depends on `seed` and on a clip's index, a batch at a time.

        Every rank has them in full. The number of ranks changes only rounding: a rank multiplies another share of the
        tokens by the same weights, and matrix products of another shape round differently.
        """
        sampler = self.task.sampler(clips.size)
        frames, height, width = clips.size
        n, samples = len(clips.titles), []
        batches = range(0, n, self.config.train.batch)
        for done, start in enumerate(batches):
            ids = range(start, min(start + self.config.train.batch, n))
            noise = seeded_noise(seed, 0, ids, range(frames), (self.task.channels, height, width), device=device)
            conditions = clips.conditions.items()
            arguments: dict[str, Any] = {name: value[start : ids.stop].to(device) for name, value in conditions}
            distilled = "strength" in arguments  # the model takes guidance as an input, and is called once
            if distilled:
                arguments["strength"] = torch.full_like(arguments["strength"], 1000 * guidance)
            arguments["guidance"] = 1.0 if clips.uncond is None or distilled else guidance
            if clips.uncond is not None and not distilled:
                arguments["uncond"] = {name: value[start : ids.stop].to(device) for name, value in clips.uncond.items()}
            if clips.first is not None:
                first = clips.first.shape[1]
                arguments["clean"] = torch.zeros_like(noise)
                arguments["clean"][:, :, :first] = clips.first.to(device)
                arguments["x_mask"] = (torch.arange(frames, device=device) >= first).expand(len(ids), frames)
            count = lambda step, steps, done=done: on_step(done * steps + step, len(batches) * steps)  # noqa: E731
            samples.append(sampler(model, noise, steps, on_step=count, **arguments).cpu())
        return torch.cat(samples)

    def baselines(self, objective: Any) -> list[Baseline]:
        if not getattr(self.config.eval, "linear_baseline", False):
            return []
        return [Baseline("baseline_linear", "best linear denoiser on the same data", self.linear_baseline(objective))]

    def linear_baseline(self, objective: Any) -> float:
        """The validation loss of the best linear denoiser, fitted to training clips."""
        fit = [(i % len(self.task.train), i // len(self.task.train)) for i in range(BASELINE_CLIPS)]
        train = [self.task.train.clip(index, epoch) for index, epoch in fit]
        validation = [self.task.validation.clip(index, epoch) for index, epoch in self.task.judged_clips()]
        x, y = (torch.stack([clip["x"] for clip in clips]) for clips in (train, validation))
        levels = objective.validation_levels(self.config.eval.levels, prod(self.task.clip))
        if self.task.num_classes is None:
            return linear_denoiser_loss(x, y, levels).mean().item()
        labels = (torch.tensor([clip["label"] for clip in clips]) for clips in (train, validation))
        return linear_denoiser_loss(x, y, levels, *labels).mean().item()


def begin_with(clips: Clips, first: Mapping[str, Tensor]) -> None:
    """Add the conditions that the first frame gives, of n rows, with guidance and without."""
    clips.conditions |= first
    if clips.uncond is not None:
        clips.uncond |= first


def shown(titles: Sequence[str]) -> Sequence[str] | None:
    """Titles to write under clips: none where all are empty."""
    return titles if any(titles) else None


def columns(n: int) -> int | None:
    """The columns of a grid of n whose rows are full, if there is one."""
    return max((columns for columns in range(2, 9) if n % columns == 0), default=None)


class Infer(task.Infer):
    """Draws clips and writes movies."""

    show: Show
    task: Task

    def arguments(self, parser: ArgumentParser) -> None:
        options, classes = self.config.sample, getattr(self.config.data, "classes", None)
        if classes:
            parser.add_argument(
                "--label", type=int, nargs="+", help=f"one clip of each class given, 0 to {classes - 1}"
            )
        parser.add_argument("--prompt", nargs="+", help="one clip of each caption given", metavar="CAPTION")
        parser.add_argument("--negative-prompt", help="what guidance leads away from", metavar="CAPTION")
        parser.add_argument("--clips", type=int, default=options.clips, help="or this many clips")
        trained = "default: that of the largest clips of training"
        for name in ("frames", "height", "width"):
            parser.add_argument(f"--{name}", type=int, default=SUPPRESS, help=f"of a clip, in pixels ({trained})")
        parser.add_argument("--fps", type=float, default=SUPPRESS, help=f"frames a second ({trained})")
        parser.add_argument("--first-frame", type=Path, help="an image or a video that every clip begins with")
        parser.add_argument("--hold", type=int, help="only so many of its frames")
        parser.add_argument("--steps", type=int, default=options.steps, help="sampling steps")
        parser.add_argument("--guidance", type=float, default=options.guidance, help="classifier-free guidance")
        parser.add_argument("--seed", type=int, default=0, help="another number gives other clips")
        parser.add_argument("--format", default="gif", help="gif (all clips in one), mp4 (a file a clip) or gif,mp4")

    def run(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        formats, watch = options.format.split(","), Stopwatch()
        if unknown := sorted(set(formats) - set(FORMATS)):
            raise ValueError(
                f"--format {options.format}: unknown format {unknown[0]!r}; expected one of {', '.join(FORMATS)}"
            )
        for name in ("clips", "frames", "height", "width", "hold", "steps"):
            if (getattr(options, name, None) or 1) < 1 or getattr(options, name, None) == 0:
                raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
        if getattr(options, "fps", 1) <= 0:
            raise ValueError(f"--fps {options.fps}: must be above 0")
        begun = self.task.conditions.start > 0  # every clip begins with an image, a condition
        if options.first_frame and not (self.task.masked or begun):
            raise ValueError(
                "--first-frame: this model was trained without clean frames (objective.first_frame and "
                "objective.random_frames were 0), so it cannot go on from one"
            )
        low, high = self.config.objective.range
        if (low, high) != (0, 1):
            raise ValueError(
                f"this model was trained on noise levels {low:g} to {high:g} (objective.range) and draws nothing "
                "alone: export it into the pipeline that has both models"
            )
        if begun and not options.first_frame:
            raise ValueError(f"model {self.config.model.name} begins clips with an image: pass --first-frame FILE")
        if "mp4" in formats:
            need_av()
        with watch("loading"):
            codec = self.show.codec(getattr(options, "vae", None), device)
        with watch("text"):
            clips, fps = self.requested_clips(options, codec, device)
        if options.first_frame:
            with watch("encoding"):
                if begun:
                    first = on_first_rank(lambda: user_error(self.first_frame, options, clips, codec, device))
                    begin_with(clips, first)
                else:
                    clips.first = on_first_rank(lambda: user_error(first_frames, options, clips.size, codec))
        with watch("sampling"):
            seed = hash_seed("inference", options.seed)
            samples = self.show.draw(model, clips, seed, options.steps, options.guidance, device, on_step)
        with watch("decoding"):
            self.results = pixels = decode(samples, codec)
        with watch("writing"):
            written = on_first_rank(lambda: user_error(write, options, formats, pixels, fps, clips.titles))
        rounds = options.steps * -(-len(samples) // self.config.train.batch)
        watch.notes["sampling"] = f" ({watch.spent['sampling'] / rounds:.3g} s a step)"
        self.account = f"{watch}; {len(samples)} x {self.task.tokens_of(clips.size):,} tokens"
        return written

    def first_frame(self, options: Namespace, clips: Clips, codec: Any, device: torch.device) -> dict[str, Tensor]:
        """The conditions of clips that begin with the image `options.first_frame`, of n rows."""
        frames, height, width = codec.pixel_shape(*clips.size)
        image = read_frames(options.first_frame, height, width, most=1)[:, 0]
        start = encode_start(self.task.conditions, image, (frames, height, width), codec)
        return {"start": start.expand(len(clips.titles), *start.shape)}

    def requested_clips(self, options: Namespace, codec: Any, device: torch.device) -> tuple[Clips, float]:
        """The clips that infer.py is asked for, and their frames a second. A ValueError names a wrong option."""
        for name in ("prompt", "negative_prompt"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: the data of this run ({self.config.data.name}) has no captions"
                    + ("; --label names classes" if self.task.num_classes is not None else "")
                )
        labels, classes = getattr(options, "label", None), self.task.num_classes
        if labels and not all(0 <= label < (classes or 0) for label in labels):
            known = "the model knows no classes" if classes is None else f"the classes are 0 to {classes - 1}"
            raise ValueError(f"--label {' '.join(map(str, labels))}: {known}")
        if options.guidance != 1 and classes is None and not self.task.conditions.guidance:
            raise ValueError(f"--guidance {options.guidance:g}: the model is told no class, so it takes no guidance")
        fps = getattr(options, "fps", self.config.data.fps or FPS)
        labels = labels or [i % (classes or 1) for i in range(options.clips)]
        return self.show.clips(labels, requested_size(options, self.task.clip), fps), fps


def requested_size(options: Namespace, trained: tuple[int, int, int]) -> tuple[int, int, int]:
    """Frames, height and width in pixels; by default those of training."""
    frames, height, width = (getattr(options, n, size) for n, size in zip(("frames", "height", "width"), trained))
    return frames, height, width


def first_frames(options: Namespace, size: tuple[int, int, int], codec: Any) -> Tensor:
    """The latent (c, first frames, h, w) of the file that the clips begin with."""
    frames, height, width = codec.pixel_shape(*size)
    x = read_frames(options.first_frame, height, width, most=options.hold)
    shown = f"--first-frame {options.first_frame}"
    if options.hold and x.shape[1] < options.hold:
        raise ValueError(f"{shown} has {x.shape[1]} frames, fewer than --hold {options.hold}")
    if x.shape[1] >= frames:
        raise ValueError(f"{shown}: {x.shape[1]} of {frames} frames are given, which leaves none to make; use --hold N")
    user_error(codec.latent_shape, *x.shape[1:], prefix=f"{shown}: ")
    return codec.encode(x)


def write(options: Namespace, formats: Sequence[str], pixels: Tensor, fps: float, titles: Sequence[str]) -> list[Path]:
    """Write movies of all clips: one GIF, with titles under several clips, or an MP4 of each."""
    written, stem = [], f"seed-{options.seed}"
    if "gif" in formats:
        written.append(options.out / f"{stem}.gif")
        below = shown(titles) if len(titles) > 1 else None
        save_gif(written[-1], pixels, fps=fps, columns=columns(len(pixels)), titles=below)
    for i in range(len(pixels) if "mp4" in formats else 0):
        written.append(options.out / (f"{stem}-{i}.mp4" if len(pixels) > 1 else f"{stem}.mp4"))
        save_mp4(written[-1], pixels[i : i + 1], fps=fps)
    return written


class Stopwatch:
    """The time that the parts of a job took, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[name] = time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(f"{name} {spent:.2f} s{self.notes.get(name, '')}" for name, spent in self.spent.items())
