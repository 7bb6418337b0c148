"""The half of the video task that makes clips: draws latents, decodes them on all ranks, writes movies.

infer.py draws what it is asked for; a training run, every now and then, draws clips of the classes or captions of real
ones, and shows each under the real one. Letters: n clips, c channels, t frames, h w height and width in latent cells
(for pixels: pixels), b clips of a batch.
"""

import time
from abc import abstractmethod
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.sampling import hash_seed
from zoo.data.video_folder import read_frames
from zoo.pictures import GREY
from zoo.training import task, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.task import share
from zoo.video.diffusion import ddim, euler, seeded_noise
from zoo.video.gif import save_gif, to_pixels
from zoo.video.movie import need_av, save_mp4

_SAMPLES = hash_seed("samples")
FORMATS = ("gif", "mp4")


@dataclass
class Clips:
    """Clips to be drawn, all of one size, and what the model is told of each: tensors with n rows."""

    size: tuple[int, int, int]  # t h w
    told: dict[str, Tensor]
    none: dict[str, Tensor] | None  # the same of no class or the empty caption, if guidance is to lead away from it
    titles: list[str]  # the class or the caption
    held: Tensor | None = None  # (c, first frames, h, w) that all of them begin with


class Pixels:
    """What stands for the autoencoder where a model works on pixels."""

    factor, causal = (1, 1, 1), False

    def __init__(self, channels: int):
        self.channels = channels

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return self.channels, frames, height, width

    def pixel_shape(self, t: int, h: int, w: int) -> tuple[int, int, int]:
        return t, h, w

    def encode(self, frames: Tensor) -> Tensor:
        return frames if len(frames) == self.channels else frames.mean(0, keepdim=True)

    def decode(self, latent: Tensor) -> Tensor:
        return latent


@dataclass
class Pairs:
    """Samples and the real clips beside them, (n c t y x) uint8, on rank 0; None elsewhere."""

    real: Tensor | None
    samples: Tensor | None
    titles: list[str]
    fps: float


class Sampling(task.Task):
    """What is shown of a video model. The data comes from `codec`, `asked` and `real`."""

    media = "gif"

    @property
    @abstractmethod
    def masked(self) -> bool:
        """Whether the model was trained with clean frames among the noised ones."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Of a latent."""

    # ------------------------------------------------------------------------------------------- what the data has

    @abstractmethod
    def codec(self, path: Path | None, device: torch.device) -> Any:
        """What decodes the model's clips: `Pixels`, or the autoencoder at `path` (None: where the data says)."""

    @abstractmethod
    def asked(self, options: Namespace, codec: Any, device: torch.device) -> tuple[Clips, float]:
        """The clips that infer.py is asked for, and their frames a second. A ValueError names a wrong option."""

    @abstractmethod
    def real(self, count: int) -> tuple[Clips, Tensor, float]:
        """Validation clips of one size, always the same: what is told of them, they (n c t h w), frames a second."""

    @abstractmethod
    def _tokens(self, clip: tuple[int, int, int]) -> int:
        """Tokens of a clip (t h w)."""

    # ------------------------------------------------------------------------------------------------ during training

    def sample(self, model: Callable[..., Tensor], device: torch.device, on_step: Callable[..., None]) -> Pairs:
        """Clips from fixed noise, of the classes or captions of real ones, and these."""
        options = self.config.sample
        clips, x, fps = user_error(self.real, options.clips)
        made = self.draw(model, clips, _SAMPLES, options.steps, options.guidance, device, on_step)
        codec = user_error(self.codec, None, device)
        return Pairs(decode(x, codec), decode(made, codec), clips.titles, fps)

    def show(self, samples: Pairs, path: Path) -> Mapping[str, float]:
        assert samples.real is not None
        assert samples.samples is not None
        n, c, t, _, w = samples.real.shape
        line = torch.full((n, c, t, 1, w), GREY, dtype=torch.uint8)
        pairs = torch.cat([samples.real, line, samples.samples], dim=3)  # the sample under the real clip
        titles = samples.titles if any(samples.titles) else None
        save_gif(path, pairs, fps=samples.fps, columns=_columns(n), titles=titles)
        return {}

    # ---------------------------------------------------------------------------------------------------- in infer.py

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

    def infer(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        formats, watch = options.format.split(","), Stopwatch()
        if unknown := sorted(set(formats) - set(FORMATS)):
            raise ValueError(f"--format {options.format}: {unknown[0]!r} is none of {', '.join(FORMATS)}")
        for name in ("clips", "frames", "height", "width", "hold", "steps"):
            if (getattr(options, name, None) or 1) < 1 or getattr(options, name, None) == 0:
                raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
        if getattr(options, "fps", 1) <= 0:
            raise ValueError(f"--fps {options.fps}: must be above 0")
        if options.first_frame and not self.masked:
            raise ValueError(
                "--first-frame: this model was trained without clean frames (objective.first_frame and "
                "objective.random_frames were 0), so it cannot go on from one"
            )
        if "mp4" in formats:
            need_av()
        with watch("loading"):
            codec = self.codec(getattr(options, "vae", None), device)
        with watch("text"):
            clips, fps = self.asked(options, codec, device)
        if options.first_frame:
            with watch("encoding"):
                clips.held = on_first_rank(lambda: user_error(_held, options, clips.size, codec))
        with watch("sampling"):
            seed = hash_seed("inference", options.seed)
            made = self.draw(model, clips, seed, options.steps, options.guidance, device, on_step)
        with watch("decoding"):
            pixels = decode(made, codec)
        with watch("writing"):
            written = on_first_rank(lambda: user_error(_write, options, formats, pixels, fps))
        rounds = options.steps * -(-len(made) // self.config.train.batch)
        watch.notes["sampling"] = f" ({watch.spent['sampling'] / rounds:.3g} s a step)"
        self.account = f"{watch}; {len(made)} x {self._tokens(clips.size):,} tokens"
        return written

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
        """Latents (n c t h w) on the CPU, from noise that depends on `seed` and on a clip's place, a batch at a time.

        Every rank has them whole. They are the same on any number of ranks but for rounding: a rank multiplies other
        shares of the tokens by the same weights, and matrix products of another shape round otherwise.
        """
        sampler: Any = {"rectified_flow": euler, "iddpm": ddim}[self.config.objective.name]
        frames, height, width = clips.size
        n, made = len(clips.titles), []
        batches = range(0, n, self.config.train.batch)
        for done, start in enumerate(batches):
            ids = range(start, min(start + self.config.train.batch, n))
            noise = seeded_noise(seed, 0, ids, range(frames), (self.channels, height, width), device=device)
            given: dict[str, Any] = {name: value[start : ids.stop].to(device) for name, value in clips.told.items()}
            given["guidance"] = 1.0 if clips.none is None else guidance
            if clips.none is not None:
                given["uncond"] = {name: value[start : ids.stop].to(device) for name, value in clips.none.items()}
            if clips.held is not None:
                first = clips.held.shape[1]
                given["clean"] = torch.zeros_like(noise)
                given["clean"][:, :, :first] = clips.held.to(device)
                given["x_mask"] = (torch.arange(frames, device=device) >= first).expand(len(ids), frames)
            count = lambda step, steps, done=done: on_step(done * steps + step, len(batches) * steps)  # noqa: E731
            made.append(sampler(model, noise, steps, on_step=count, **given).cpu())
        return torch.cat(made)


def decode(latents: Tensor, codec: Any, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """The pixels (n c t y x), uint8, of latents (n c t h w) that every rank has: on rank 0, and None elsewhere.

    The ranks share the work: single frames if the codec takes them one by one, else whole clips. Only pixels travel, to
    rank 0 alone.
    """
    n, _, t, h, w = latents.shape
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    frames, height, width = codec.pixel_shape(t, h, w)
    if codec.causal:
        whole = torch.empty(n, 3, frames, height, width, dtype=torch.uint8) if rank == 0 else None
        parts = [to_pixels(codec.decode(latents[i])) for i in share(n, rank, size)]
        return _to_first(parts, whole, n, rank, size, group)
    here = share(n * t, rank, size)
    row = latents.transpose(0, 1).flatten(1, 2)[:, here.start : here.stop]
    parts = list(to_pixels(codec.decode(row)).transpose(0, 1)) if len(here) else []
    channels = 3 if not isinstance(codec, Pixels) else codec.channels
    whole = torch.empty(n * t, channels, height, width, dtype=torch.uint8) if rank == 0 else None
    whole = _to_first(parts, whole, n * t, rank, size, group)
    return None if whole is None else whole.unflatten(0, (n, t)).transpose(1, 2)


def _to_first(
    parts: Sequence[Tensor], whole: Tensor | None, units: int, rank: int, size: int, group: dist.ProcessGroup | None
) -> Tensor | None:
    """`whole` (units ...) on rank 0, filled with the parts of all ranks, each of which has its `share` of the units."""
    if whole is None:
        if parts:
            dist.send(torch.stack(list(parts)), group=group, group_dst=0)
        return None
    if parts:
        whole[: len(parts)] = torch.stack(list(parts))
    for other in range(1, size):
        if theirs := share(units, other, size):
            dist.recv(whole[theirs.start : theirs.stop], group=group, group_src=other)
    return whole


def _held(options: Namespace, size: tuple[int, int, int], codec: Any) -> Tensor:
    """The latent (c, first frames, h, w) of the file that the clips begin with."""
    frames, height, width = codec.pixel_shape(*size)
    x = read_frames(options.first_frame, height, width, most=options.hold)
    shown = f"--first-frame {options.first_frame}"
    if options.hold and x.shape[1] < options.hold:
        raise ValueError(f"{shown} has {x.shape[1]} frames, fewer than --hold {options.hold}")
    if x.shape[1] >= frames:
        raise ValueError(f"{shown}: {x.shape[1]} of {frames} frames, which leaves none to make; --hold takes fewer")
    user_error(codec.latent_shape, *x.shape[1:], prefix=f"{shown}: ")
    return codec.encode(x)


def _write(options: Namespace, formats: Sequence[str], pixels: Tensor, fps: float) -> list[Path]:
    written, stem = [], f"seed-{options.seed}"
    if "gif" in formats:
        written.append(options.out / f"{stem}.gif")
        save_gif(written[-1], pixels, fps=fps, columns=_columns(len(pixels)))
    for i in range(len(pixels) if "mp4" in formats else 0):
        written.append(options.out / (f"{stem}-{i}.mp4" if len(pixels) > 1 else f"{stem}.mp4"))
        save_mp4(written[-1], pixels[i : i + 1], fps=fps)
    return written


def _columns(n: int) -> int | None:
    """Of a grid of n whose rows are full, if there is one."""
    return max((columns for columns in range(2, 9) if n % columns == 0), default=None)


class Stopwatch:
    """How long the parts of a job took, by name."""

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
