"""The pictures of a video model on latents, and of infer.py: captions are embedded, latents decoded."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.data.latent_folder import LatentFolder, padded
from zoo.data.sampling import order
from zoo.data.video_file import read_frames
from zoo.training import UserError, user_error
from zoo.training.outputs import video
from zoo.training.outputs.clips import Clips
from zoo.training.outputs.video import Pairs, requested_size
from zoo.training.ranks import on_first_rank
from zoo.training.tasks.latents import Task, clip_sizes
from zoo.video.codec import Autoencoder, CodecError
from zoo.video.encoders import ImageEncoder, PooledEncoder, TextEncoder


class Show(video.Show):
    """Clips of the largest shape, with their captions."""

    probed = False
    task: Task

    def __init__(self, task: Any):
        super().__init__(task)
        self.codecs: dict[Path | None, Any] = {}  # by path: read once, and planned once where ranks share the work

    def ready(self) -> None:
        options = self.config.sample
        if not options.every:
            return
        on_first_rank(self._try_decoder)
        on_first_rank(lambda: options.metrics and self.features is None)
        if options.prompts and options.metrics:
            raise UserError("sample.metrics=true compares samples with real clips, which sample.prompts has none of")
        if options.prompts:
            with torch.device("meta"):
                self.task.model()  # which says what conditions it takes
            self.prompts = self.texts(options.prompts, options.text, "sample.text", self.task.device)

    @property
    def count(self) -> int:
        return len(self.config.sample.prompts) or self.config.sample.clips

    @property
    def paired(self) -> bool:
        return not self.config.sample.prompts

    def _try_decoder(self) -> None:
        """Load and check the decoder, so that an error comes now rather than hours later."""
        advice = "sample.vae names its folder, and sample.every=0 samples nothing"
        try:
            self.check(self._autoencoder(None, advice), "vae")
        except CodecError as error:
            raise UserError(f"sample.every={self.config.sample.every}: {error}") from None

    def codec(self, path: Path | None, device: torch.device) -> Any:
        if path not in self.codecs:
            codec = self._autoencoder(path, "--vae names its folder")
            on_first_rank(lambda: user_error(self.check, codec, "vae"))
            self.codecs[path] = codec
        self.codecs[path].module.to(device)
        return self.codecs[path]

    def sample(self, model: Callable[..., Tensor], device: torch.device, on_step: Callable[..., None]) -> Pairs:
        """Sample, then move the autoencoders to the host's memory."""
        try:
            return super().sample(model, device, on_step)
        finally:
            for codec in self.codecs.values():
                codec.module.to("cpu")

    def _autoencoder(self, path: Path | None, advice: str) -> Any:
        assert self.task.manifest is not None
        try:
            return Autoencoder.load(path or self.config.sample.vae or self.task.manifest.vae_path)
        except CodecError as error:
            raise CodecError(f"{error}; {advice}") from None

    def check(self, encoder: Any, kind: str) -> None:
        """Raise CodecError if this is another autoencoder ("vae") or text encoder ("text") than that of the latents."""
        name, path, known = (getattr(self.task.manifest, f"{kind}{suffix}") for suffix in ("", "_path", "_hash"))
        if encoder.fingerprint != known:
            raise CodecError(
                f"the {encoder.name} at {encoder.path} is not the {name} that encoded the training data (then at "
                f"{path}): its fingerprint is {encoder.fingerprint[:12]}, not {known[:12]}"
            )

    def real(self, count: int) -> tuple[Clips, Tensor, float]:
        held_out = next(clips for clips in self.task.validation.clips if clips)  # of the largest shape with any
        places = order(0, 0, len(held_out)).tolist()
        entries = [held_out[places[i % len(places)]] for i in range(count)]
        x = torch.stack([self.task.validation.latent(entry) for entry in entries])
        folder, texts = self.task.validation, "context" in self.task.takes
        conditions = self.task.conditions_of_clips(folder, entries, [False] * count)
        none = self.task.conditions_of_clips(folder, entries, [True] * count) if texts else None
        titles = [entry.caption if texts else "" for entry in entries]
        if self.config.sample.prompts:
            conditions, titles = conditions | self.prompts, list(self.config.sample.prompts)
        return Clips(entries[0].shape[1:], conditions, none, titles), x, entries[0].fps

    def texts(
        self, captions: Sequence[str], path: str | Path | None, option: str, device: torch.device | str
    ) -> dict[str, Tensor]:
        """The embeddings of captions as arguments of the model, by the text encoders of the training data.

        path: the folder of the encoders, which `option` names (None: where the manifest says). Collective.
        """
        known = self.task.manifest
        assert known is not None
        if "context" not in self.task.takes:
            raise UserError(f"sample.prompts: the model {self.config.model.name} takes no text")

        def embed() -> list[Tensor]:
            try:
                encoder = TextEncoder.load(path or known.text_path, device, length=known.text_length)
            except CodecError as error:
                raise CodecError(f"{error}; {option} names the folder of the text encoder") from None
            self.check(encoder, "text")
            return encoder.encode(captions)

        def pool() -> list[Tensor]:
            encoder = PooledEncoder.load(path or known.pooled_path, device)
            self.check(encoder, "pooled")
            return list(encoder.encode(captions))

        texts = on_first_rank(lambda: user_error(embed))
        vectors = on_first_rank(lambda: user_error(pool)) if "pooled" in self.task.takes else []
        padded_texts = zip(*(padded(text, known.text_length) for text in texts))
        rows = {name: torch.stack(rows) for name, rows in zip(("context", "context_mask"), padded_texts)}
        return rows | ({"pooled": torch.stack(vectors)} if vectors else {})


class Infer(video.Infer):
    """Draws clips of captions."""

    show: Show
    task: Task

    def arguments(self, parser: ArgumentParser) -> None:
        super().arguments(parser)
        parser.set_defaults(clips=1)
        elsewhere = "if it is not where the manifest of the latents says"
        parser.add_argument("--vae", type=Path, help=f"folder of the autoencoder, {elsewhere}")
        parser.add_argument("--text", type=Path, help=f"folder of the text encoder, {elsewhere}")
        parser.add_argument("--image", type=Path, help=f"folder of the image encoder, {elsewhere}")

    def requested_clips(self, options: Namespace, codec: Any, device: torch.device) -> tuple[Clips, float]:
        assert self.task.manifest is not None
        if options.prompt and "context" not in self.task.takes:
            raise ValueError(f"--prompt: the model {self.config.model.name} takes no text")
        captions = options.prompt or [""] * options.clips
        if options.negative_prompt is not None and self.task.conditions.guidance:
            raise ValueError("--negative-prompt: this model takes guidance as an input and leads away from nothing")
        if options.negative_prompt is not None and (options.guidance == 1 or not options.prompt):
            raise ValueError("--negative-prompt is what guidance leads away from: it needs --prompt and --guidance")
        folder = self.task.read()
        pixels = requested_size(options, codec.pixel_shape(*folder.buckets[0].shape))
        size = codec.latent_shape(*pixels)[1:]
        fps = getattr(options, "fps", Counter(entry.fps for entry in folder.clips[0]).most_common(1)[0][0])
        n, sizes, none = len(captions), clip_sizes(*pixels, fps) | {"strength": 0.0}, None
        conditions = {name: torch.full((n,), sizes[name]) for name in sizes if name in self.task.takes}
        if "context" in self.task.takes:
            rows = self._texts(folder, options, captions, device)
            if options.prompt and not self.task.conditions.guidance:
                none = conditions | {name: row[-1:].expand_as(row[:-1]) for name, row in rows.items()}
            conditions |= {name: row[:-1] for name, row in rows.items()}
        return Clips(size, conditions, none, captions), fps

    def _texts(
        self, folder: LatentFolder, options: Namespace, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """The embeddings of captions and, in the last row, of the negative one, as arguments of the model."""
        wanted = [*captions, options.negative_prompt or ""]
        if options.prompt:
            return self.show.texts(wanted, options.text, "--text", device)
        context, mask = folder.caption(None)
        empty = {"context": context, "context_mask": mask}
        if "pooled" in self.task.takes:
            empty["pooled"] = folder.vectors(None, "pooled")
        return {name: row.expand(len(wanted), *row.shape) for name, row in empty.items()}

    def first_frame(self, options: Namespace, clips: Clips, codec: Any, device: torch.device) -> dict[str, Tensor]:
        first = super().first_frame(options, clips, codec, device)
        if "image" in self.task.takes:
            assert self.task.manifest is not None
            encoder = ImageEncoder.load(options.image or self.task.manifest.image_path, device)
            self.show.check(encoder, "image")
            height, width = codec.pixel_shape(*clips.size)[1:]
            image = read_frames(options.first_frame, height, width, most=1)[:, 0]
            first["image"] = encoder.encode(image).expand(len(clips.titles), -1, -1)
        return first
