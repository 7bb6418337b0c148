"""Captions and first frames to embeddings: text and image encoders of transformers.

They are read from local folders as transformers saves them, or from a pipeline's folder: `text_encoder/` with
`tokenizer/`, `text_encoder_2/` with `tokenizer_2/`, `image_encoder/` with `image_processor/`. Only safetensors and the
classes listed below are accepted; nothing is downloaded, and no code that a file names is run. Each caption or image is
encoded alone, so that its bits do not depend on the others. Letters: l j tokens, e channels.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.contract import Conditions
from zoo.video.codec import Autoencoder
from zoo.video.pretrained import (
    CodecError,
    configuration,
    from_pretrained,
    image_processor,
    library,
    sha256,
    tokenizer,
    variant_of,
    weights,
)

__all__ = ["TEXT_ENCODERS", "ImageEncoder", "PooledEncoder", "TextEncoder", "encode_start", "has_pooled"]

# by the model_type of config.json
TEXT_ENCODERS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel", "llama": "LlamaModel"}
CLIP_TOKENS = 77  # of a caption, which is cut off there, as pipelines do

# A language model reads a caption within this text, as HunyuanVideo's does. Its embedding is that of the last layer but
# two, from the caption on
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
BEFORE, LAYER = 95, -3  # tokens of the template before the caption; the layer


class TextEncoder:
    """A T5 encoder or a Llama, and its tokenizer: `TextEncoder.load(path)`.

    A caption has at most `length` tokens, end included; the template around it does not count.
    """

    def __init__(self, module: Any, tokens: Callable[[str], list[int]], path: Path, files: Sequence[Path], length: int):
        self.module, self.path, self.name, self.length = module, path, type(module).__name__, length
        self.channels: int = module.config.hidden_size
        self.before = BEFORE if self.name == "LlamaModel" else 0
        self._tokens, self._files = tokens, files

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        length: int = 300,
        variant: str | None = None,
    ) -> "TextEncoder":
        """Load a folder with config.json and model.safetensors, or a pipeline's folder with `text_encoder/`.

        The tokenizer, tokenizer.json or spiece.model, is in the same folder, in its `tokenizer/`, or in the pipeline's.
        `variant`, such as fp16: the weights to take where the folder has them in this variant, too.
        """
        folder, config = configuration(Path(path), "text_encoder")
        name = TEXT_ENCODERS.get(str(config.get("model_type", "")))
        if name is None:
            known = ", ".join(TEXT_ENCODERS)
            raise CodecError(f"{folder}: a text encoder of type {config.get('model_type')!r}; known here: {known}")
        variant = variant_of(folder, "model", variant)
        files = weights(folder, "model", variant)
        tokens, vocabulary, file = tokenizer([folder, folder / "tokenizer", folder.parent / "tokenizer"])
        module = from_pretrained(getattr(library("transformers"), name), folder, dtype=dtype, variant=variant)
        if vocabulary > module.config.vocab_size:
            raise CodecError(
                f"{file} has {vocabulary} tokens and the {name} at {folder} knows {module.config.vocab_size}: "
                "this is not its tokenizer"
            )
        module = module.to(device).eval().requires_grad_(False)
        return cls(module, tokens, folder, [folder / "config.json", *files, file], length)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of configuration, weights and tokenizer; the files are read once more, on first use."""
        return sha256(self._files)

    def count(self, caption: str) -> int:
        """The number of tokens of a caption, end included."""
        return len(self._within(caption)) - self.before

    def tokens(self, caption: str) -> list[int]:
        """The token numbers of a caption; CodecError if there are more than `length`."""
        numbers = self._within(caption)
        if len(numbers) - self.before > self.length:
            raise CodecError(
                f"a caption of {len(numbers) - self.before} tokens, and {self.length} are allowed: {caption[:60]!r}"
                "...; shorten it, or allow more"
            )
        return numbers

    def _within(self, caption: str) -> list[int]:
        return self._tokens(TEMPLATE.format(caption) if self.before else caption)

    @torch.no_grad()
    def encode(self, captions: Sequence[str], *, padded: bool = False) -> list[Tensor]:
        """The embedding [l, e] of every caption, without padding: float32, on the CPU. T5's of "" is [1, e].

        `padded`: [length, e], with the encoder's output for the padding after the caption, to which the caption does
        not attend.
        """
        rows = [self.tokens(caption) for caption in captions]
        return [self._embed(row, self.length + self.before if padded else len(row)).float().cpu() for row in rows]

    def _embed(self, row: list[int], length: int) -> Tensor:
        ids = torch.full((1, length), self.module.config.pad_token_id or 0, device=self.module.device)
        ids[0, : len(row)] = torch.tensor(row)
        seen = {} if length == len(row) else {"attention_mask": (torch.arange(length) < len(row))[None].to(ids)}
        if self.before:
            layers = self.module(input_ids=ids, **seen, output_hidden_states=True).hidden_states
            return layers[LAYER][0, self.before :]
        return self.module(input_ids=ids, **seen).last_hidden_state[0]


def has_pooled(folder: str | Path) -> bool:
    """Tell whether the folder of a pipeline has a second text encoder."""
    return (Path(folder) / "text_encoder_2").is_dir()


class PooledEncoder:
    """CLIP's text encoder, `text_encoder_2/` of a pipeline, which makes one vector of a caption."""

    def __init__(self, module: Any, tokens: Any, path: Path, files: Sequence[Path]):
        self.module, self.path, self.name = module, path, type(module).__name__
        self.channels: int = module.config.hidden_size
        self._tokens, self._files = tokens, files

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        variant: str | None = None,
    ) -> "PooledEncoder":
        folder, config = configuration(Path(path), "text_encoder_2")
        if (kind := config.get("model_type")) != "clip_text_model":
            raise CodecError(f"{folder}: a text encoder of type {kind!r}; known here: clip_text_model")
        places = [folder.parent / "tokenizer_2", folder / "tokenizer", folder]
        words = [place / name for place in places for name in ("tokenizer.json", "vocab.json")]
        file = next((file for file in words if file.is_file()), None)
        if file is None:
            raise CodecError(f"no tokenizer: neither tokenizer.json nor vocab.json is in {places[0]}")
        transformers = library("transformers")
        try:
            tokens = transformers.CLIPTokenizer.from_pretrained(str(file.parent), local_files_only=True)
        except Exception as error:  # of many kinds
            raise CodecError(f"{file.parent}: damaged: {error}") from None
        variant = variant_of(folder, "model", variant)
        files = [folder / "config.json", *weights(folder, "model", variant), file]
        module = from_pretrained(transformers.CLIPTextModel, folder, dtype=dtype, variant=variant)
        return cls(module.to(device).eval().requires_grad_(False), tokens, folder, files)

    @cached_property
    def fingerprint(self) -> str:
        return sha256(self._files)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Tensor:
        """The vectors (n e) of captions: float32, on the CPU. A caption is cut off at `CLIP_TOKENS`."""
        rows = []
        for caption in captions:
            ids = self._tokens(
                caption, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt"
            ).input_ids
            rows.append(self.module(input_ids=ids.to(self.module.device)).pooler_output[0].float().cpu())
        return torch.stack(rows)


class ImageEncoder:
    """CLIP's image encoder, `image_encoder/` of a pipeline, with its `image_processor/`."""

    def __init__(self, module: Any, processor: Any, path: Path, files: Sequence[Path]):
        self.module, self.path, self.name = module, path, type(module).__name__
        self.channels: int = module.config.hidden_size
        self._processor, self._files = processor, files

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str = "cpu", *, variant: str | None = None
    ) -> "ImageEncoder":
        folder, _ = configuration(Path(path), "image_encoder")
        settings = folder.parent / "image_processor" / "preprocessor_config.json"
        if not settings.is_file():
            raise CodecError(f"no such file: {settings}, which a pipeline from an image has; download that folder, too")
        transformers = library("transformers")
        variant = variant_of(folder, "model", variant)
        files = [folder / "config.json", *weights(folder, "model", variant), settings]
        module = from_pretrained(transformers.CLIPVisionModel, folder, variant=variant).to(device).eval()
        processor = image_processor(transformers).from_pretrained(str(settings.parent), local_files_only=True)
        return cls(module.requires_grad_(False), processor, folder, files)

    @cached_property
    def fingerprint(self) -> str:
        return sha256(self._files)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """The tokens (j e) of an image [3, h, w] in [-1, 1], from the last layer but one: float32, on the CPU."""
        from PIL import Image

        picture = Image.fromarray(((image + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy())
        pixels = self._processor(images=picture, return_tensors="pt").to(self.module.device)
        return self.module(**pixels, output_hidden_states=True).hidden_states[-2][0].float().cpu()


def encode_start(
    conditions: Conditions, image: Tensor, pixels: tuple[int, int, int], codec: Autoencoder, tile: int | None = None
) -> Tensor:
    """The channels (k t h w) after those of a clip that begins with an image [3, h, w] in [-1, 1].

    pixels: frames, rows and columns of the clip.
    """
    t = codec.latent_shape(*pixels)[1]
    if "frames" in conditions.first:
        latent = grey_after(image[:, None], pixels[0], codec, tile)
    else:
        one = codec.encode(image[:, None], tile=tile)
        latent = torch.cat([one, one.new_zeros(len(one), t - 1, *one.shape[2:])], dim=1)
    return conditions.start_of(latent, range(t))


def grey_after(frame: Tensor, frames: int, codec: Autoencoder, tile: int | None = None) -> Tensor:
    """The latent (c t h w) of a frame [3, 1, h, w] with empty (grey) frames after it, `frames` in all."""
    return codec.encode(torch.cat([frame, frame.new_zeros(3, frames - 1, *frame.shape[2:])], dim=1), tile=tile)
