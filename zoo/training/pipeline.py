"""Published weights in Python, on one process or all ranks of a torchrun: what `infer.py FOLDER` does.

    import zoo
    pipe = zoo.pipeline("Wan2.1-T2V-1.3B-Diffusers")
    clips = pipe.sample(prompt=["a boat on a lake"], frames=81, height=480, width=832)

All ranks share each clip (sp = all of them), and the result does not depend on how many there are.
"""

import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dsp
from zoo.data.video_file import read_frames
from zoo.pictures import need_av
from zoo.training import UserError, adapter, ranks, user_error
from zoo.training.outputs.clips import decode
from zoo.training.outputs.options import checked
from zoo.training.outputs.video import FORMATS, Stopwatch, write
from zoo.training.ranks import on_first_rank
from zoo.training.shared_codec import shared_codec
from zoo.training.tracking import number_of
from zoo.training.trained import log_written, namespace, progress, wire_option
from zoo.video import families
from zoo.video.codec import Autoencoder
from zoo.video.encoders import PooledEncoder, TextEncoder
from zoo.video.published import Branch, Prompt, Published

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_TURN = (
    "is not available for this model family: its sampler computes guidance's two predictions in separate calls, one "
    "after the other; leave it out"
)


def is_pipeline(folder: Path) -> bool:
    """True for the folder of a pipeline, False for that of a run."""
    return (folder / "transformer").is_dir() and not (folder / "config.yaml").is_file()


class Pipeline:
    """A published video model that is ready to be sampled. `close` ends the process group, if the pipeline began one.

    lora: a file or folder of adapters, or one for each transformer in turn; they are added to its weights `lora_scale`
    times.

    published: the transformers and their sampler; files: those that the last `sample` wrote to `out`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        scheduler: str | None = None,
        shift: float | None = None,
        branches: bool = False,
        wire: str = "same",
        variant: str | None = None,
        lora: str | Path | Sequence[str | Path] = (),
        lora_scale: float = 1.0,
    ):
        if dtype not in (None, *DTYPES):
            raise UserError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        stack = ExitStack()
        self.close = weakref.finalize(self, stack.close)
        self.folder, self.files, self.account = Path(folder), list[Path](), ""
        with ExitStack() as opened:
            self.device = opened.enter_context(ranks.process_group())
            kind = DTYPES[dtype] if dtype else None
            self.published: Published = user_error(
                families.read, self.folder, dtype=kind, sampler=scheduler, shift=shift, variant=variant
            )
            self.codec: Any = user_error(Autoencoder.load, self.folder, variant=variant)
            if self.codec.channels != (channels := self.published.conditions.channels):
                raise UserError(
                    f"{self.folder}: its transformer draws {channels} latent channels, and its vae has "
                    f"{self.codec.channels}"
                )
            world, over = dist.get_world_size(), 2 if branches else 1
            if world % over:
                raise UserError(
                    f"branches splits the ranks into two halves and needs an even number of ranks, not {world}"
                )
            if branches and self.published.scheduler is None:
                raise UserError(f"branches {IN_TURN}")
            mesh = init_device_mesh(self.device.type, (over, world // over), mesh_dim_names=("guidance", "sp"))
            self.halves = mesh["guidance"] if branches else None
            files = [lora] if isinstance(lora, str | Path) else lora
            if len(files) > len(self.published.models):
                raise UserError(f"--lora: {len(files)} adapters for {len(self.published.models)} transformers")
            for model, file in zip(self.published.models, files):
                user_error(adapter.merge, model, Path(file), lora_scale, prefix="--lora: ")
            for model in self.published.models:
                user_error(dsp.parallelize, model.to(self.device), mesh["sp"], wire=wire)
            stack.push(opened.pop_all())
        self.texts: list[Any] = []  # read on rank 0, at their first use

    def sample(self, prompt: str | Sequence[str], **options: Any) -> Tensor | None:
        """A clip for each prompt, (n c t y x) uint8, on rank 0, None elsewhere; options are those of `infer.py FOLDER`.

        For example ``frames=81, height=480, width=832, steps=50, guidance=5.0, negative_prompt="", seed=0``;
        ``first_frame`` is a file, or a tensor [3, y, x] in [-1, 1]. With ``out``, a folder, files are written as well
        and named in `files`. A UserError names a wrong option.
        """
        parser = ArgumentParser()
        arguments(parser, type(self.published), None)
        chosen = namespace(parser, options, but="prompt")
        chosen.prompt = [prompt] if isinstance(prompt, str) else list(prompt)
        return self.run(chosen, progress())

    def run(self, options: Namespace, on_step: Callable[[int, int], None]) -> Tensor | None:
        """Sample as the options say; `account` gets the time that it took, in words."""
        options, watch = checked(options, self.published.size), Stopwatch()
        pixels, formats = (options.frames, options.height, options.width), options.format.split(",")
        self._refuse(options, formats)
        cells = user_error(self.codec.latent_shape, *pixels)
        with watch("text"):
            prompt = on_first_rank(lambda: user_error(self._captions, options))
        self.published.add_sizes(prompt, n := len(options.prompt), pixels, options.fps, options.guidance)
        if options.first_frame is not None:
            with watch("encoding"):
                image = options.first_frame
                if not isinstance(image, Tensor):
                    file = Path(image)
                    image = on_first_rank(lambda: user_error(read_frames, file, *pixels[1:], most=1)[:, 0])
                self.codec.module.to(self.device)
                shared = shared_codec(self.codec) if self.codec.causal else self.codec
                tokens = on_first_rank(lambda: user_error(self.published.image_tokens, image))
                user_error(self.published.begin, prompt, n, image, tokens, pixels, shared)
                self.codec.module.to("cpu")  # the transformer needs the memory
        with watch("sampling"):
            latents = self._draw(prompt, cells, options, on_step)
        with watch("decoding"):
            self.codec.module.to(self.device)
            clips = decode(latents, self.codec, tile=options.tile)
            self.codec.module.to("cpu")
        if options.out is not None:
            with watch("writing"):
                titles = options.prompt
                self.files = on_first_rank(lambda: user_error(write, options, formats, clips, options.fps, titles))
        watch.notes["sampling"] = f" ({watch.spent['sampling'] / options.steps / len(latents):.3g} s a step and clip)"
        self.account = f"{watch}; {len(latents)} x {prod(cells[1:]):,} latent cells"
        return clips

    def _refuse(self, options: Namespace, formats: Sequence[str]) -> None:
        """Raise UserError for options that the folder's models do not take."""
        for name in ("frames", "height", "width", "steps", "batch"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name} {getattr(options, name)}: must be at least 1")
        if not options.fps > 0:
            raise UserError(f"--fps {options.fps}: must be above 0")
        if unknown := sorted(set(formats) - {"gif", "mp4"}):
            raise UserError(
                f"--format {options.format}: unknown format {unknown[0]!r}; expected one of {', '.join(FORMATS)}"
            )
        if "mp4" in formats and options.out is not None:
            user_error(need_av)
        source, kind = self.published, type(self.published).__name__
        if options.first_frame is not None and not source.takes_image:
            raise UserError(f"--first-frame: this {kind} draws only from text")
        if options.first_frame is None and source.conditions.start:
            raise UserError(f"this {kind} needs a first image: pass --first-frame FILE")
        if options.guidance_2 is not None and len(source.models) == 1:
            raise UserError(
                "--guidance-2 is for the second of two transformers, and this folder has only one; leave it out"
            )
        if options.true_guidance != 1 and not source.conditions.guidance:
            raise UserError("--true-guidance is for models that take guidance as an input; leave it out")
        if self.halves is not None and (options.batched or self._scale(options) == 1):
            raise UserError(
                "--branches gives each of guidance's two predictions to half of the ranks: it needs --guidance other "
                "than 1, and goes without --batched, which makes both in one call"
            )
        if options.batched and source.scheduler is None:
            raise UserError(f"--batched {IN_TURN}")

    def _scale(self, options: Namespace) -> float:
        """The scale of classifier-free guidance, which is another option for models that take guidance as an input."""
        return options.true_guidance if self.published.conditions.guidance else options.guidance

    def _captions(self, options: Namespace) -> Prompt:
        source = self.published
        if not self.texts:
            dtype, variant = self._dtype(), source.variant
            text: Any = TextEncoder.load(self.folder, dtype=dtype, length=source.length, variant=variant)
            pooled = PooledEncoder.load(self.folder, dtype=dtype, variant=variant) if source.conditions.pooled else None
            self.texts = [text, pooled]
        negative = options.negative_prompt if self._scale(options) != 1 else None
        for encoder in filter(None, self.texts):
            encoder.module.to(self.device)
        try:
            text, pooled = self.texts
            return source.prompt(text, pooled, options.prompt, negative)
        finally:
            for encoder in filter(None, self.texts):
                encoder.module.to("cpu")

    def _branch(self) -> Branch | None:
        """The number of the prediction that this rank's half makes, and a function that gathers both."""
        if self.halves is None:
            return None
        group = self.halves.get_group()

        def join(part: Tensor) -> Sequence[Tensor]:
            both = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(both, part.contiguous(), group=group)
            return both

        return self.halves.get_local_rank(), join

    def _dtype(self) -> torch.dtype:
        return next(self.published.models[0].parameters()).dtype

    def _draw(
        self, prompt: Prompt, cells: Sequence[int], options: Namespace, on_step: Callable[[int, int], None]
    ) -> Tensor:
        """Latents (n c t h w) on the CPU, float32, a batch at a time, each clip from the noise of its own seed."""
        samples, n = [], len(options.prompt)
        batches = range(0, n, options.batch)
        scale = self._scale(options)
        second = scale if options.guidance_2 is None else options.guidance_2
        for done, start in enumerate(batches):
            clips = range(start, min(start + options.batch, n))
            random = [torch.Generator().manual_seed(options.seed + i) for i in clips]
            noise = torch.cat([torch.randn((1, *cells), generator=one) for one in random]).to(self.device)

            def count(step: int, steps: int, done: int = done) -> None:
                on_step(done * steps + step, len(batches) * steps)

            latents = self.published.sample(
                prompt.rows(clips, self.device), noise, options.steps, (scale, second),
                batched=options.batched, branch=self._branch(), random=random, on_step=count,
            )  # fmt: skip
            samples.append(latents.cpu())
        return torch.cat(samples)


def arguments(parser: ArgumentParser, family: type[Published], out: Path | None) -> None:
    """Add the options of `infer.py FOLDER`, which are those of `Pipeline.sample`."""
    add = parser.add_argument
    add("--prompt", nargs="+", metavar="CAPTION", required=True, help="one clip of each caption")
    add("--negative-prompt", metavar="CAPTION", default="", help="what guidance leads away from")
    add("--first-frame", type=Path, help="an image that every clip begins with")
    for name, size in zip(("frames", "height", "width"), family.size):
        add(f"--{name}", type=int, default=size, help="of a clip, in pixels (%(default)s)")
    add("--fps", type=float, default=family.fps, help="frames a second (%(default)s)")
    add("--steps", type=int, default=family.steps, help="sampling steps (%(default)s)")
    add("--guidance", type=float, default=family.guidance, help="classifier-free guidance; 1 for none (%(default)s)")
    add("--true-guidance", type=float, default=1.0, help="classifier-free guidance beside a model's own (%(default)s)")
    add("--guidance-2", type=float, help="guidance of the second transformer (the same)")
    add("--batched", action="store_true", help="both predictions of guidance by one call: faster, more memory")
    add("--batch", type=int, default=1, help="clips at once (%(default)s)")
    add("--seed", type=int, default=0, help="of the first clip; each further one has the next number (%(default)s)")
    add("--tile", type=int, help="decode squares of so many pixels, which takes less memory (whole frames)")
    add("--out", type=Path, default=out, help="folder for the results (%(default)s)")
    add("--format", default="gif", help="gif (all clips in one), mp4 (a file a clip) or gif,mp4 (%(default)s)")


def command(argv: Sequence[str], folder: Path, parser: ArgumentParser) -> int:
    """`infer.py FOLDER [options]`: rank 0 writes to `samples/` in the current folder, or to `--out`."""
    family = user_error(families.family_of, folder)
    arguments(parser, family, Path("samples") / folder.resolve().name)
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the transformers (what they are published for)")
    parser.add_argument("--variant", help="of the weights: fp16 reads *.fp16.safetensors (those without a variant)")
    parser.add_argument("--scheduler", help="another class of diffusers' schedulers, with the folder's settings")
    parser.add_argument("--shift", type=float, help="of the scheduler's noise levels (the folder's)")
    parser.add_argument("--lora", type=Path, nargs="+", default=[], help="adapters, a file for each transformer")
    parser.add_argument("--lora-scale", type=float, default=1.0, help="how many times they are added (%(default)s)")
    parser.add_argument("--branches", action="store_true", help="guidance's two predictions by half of the ranks each")
    wire_option(parser)
    options = parser.parse_args(argv)
    pipe = Pipeline(
        folder, dtype=options.dtype, scheduler=options.scheduler, shift=options.shift, branches=options.branches,
        wire=options.wire, variant=options.variant, lora=options.lora, lora_scale=options.lora_scale,
    )  # fmt: skip
    before, size = set(options.out.glob("*")), f"{options.frames} frames of {options.height} x {options.width}"
    try:
        ranks.log0(f"drawing {number_of(len(options.prompt), 'clip')}, {size}, in {options.steps} steps")
        pipe.run(options, progress())
        ranks.log0(f"took {pipe.account}")
        log_written(pipe.files, before)
        return 0
    finally:
        pipe.close()
