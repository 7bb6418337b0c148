"""The manifest of a folder of encoded clips: which encoders made them, and their embedding of the empty caption."""

import json
import math
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.files import fits, read_json, whole_file

FORMAT = "1"
MANIFEST, UNCONDITIONAL = "manifest.json", "unconditional.safetensors"


class LatentError(ValueError):
    """A folder or a shard that cannot be used, with the reason and what to do."""


@dataclass(frozen=True)
class Manifest:
    """The encoders of a folder's clips. Latents are (z - shift) * scale, of about unit variance.

    `shift` and `scale` are one number, or one a channel.
    """

    vae: str  # the class of the autoencoder, as diffusers calls it
    vae_path: str  # the folder it was read from
    vae_hash: str  # of its configuration and weights
    channels: int  # c
    factor: tuple[int, int, int]  # pixels a latent cell, in t, h, w
    causal: bool  # the first frame is encoded alone: t = 1 + (frames - 1) / factor
    shift: float | tuple[float, ...]
    scale: float | tuple[float, ...]
    text: str  # the class of the text encoder
    text_path: str
    text_hash: str
    text_channels: int  # e
    text_length: int  # most tokens of a caption
    pooled: str = ""  # the class of a second text encoder, with one vector a caption; "" for none
    pooled_path: str = ""
    pooled_hash: str = ""
    pooled_channels: int = 0
    image: str = ""  # the class of the encoder of first frames; "" for none
    image_path: str = ""
    image_hash: str = ""
    image_channels: int = 0
    start: bool = False  # True: clips have the latent of their first frame with empty frames after it

    @property
    def more(self) -> tuple[str, ...]:
        """The names of a clip's tensors besides latent and text."""
        return tuple(name for name in ("image", "pooled", "start") if getattr(self, name))


def write_manifest(folder: Path, manifest: Manifest, unconditional: Tensor, pooled: Tensor | None = None) -> None:
    """Begin a folder, or continue one: a LatentError if it has other encoders.

    unconditional, pooled: the embeddings [l, e] and [e] of the empty caption.
    """
    from safetensors.torch import save

    if (folder / MANIFEST).exists():
        refuse_other_encoders(folder, read_manifest(folder), manifest)
        return
    empty = {"text": unconditional} | ({} if pooled is None else {"pooled": pooled})
    with whole_file(folder / UNCONDITIONAL, sync=True) as file:
        file.write(save({k: v.contiguous().cpu() for k, v in empty.items()}))
    with whole_file(folder / MANIFEST, sync=True) as file:
        file.write((json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        fields = read_json(path, 1 << 20)
        if fields.pop("format") != FORMAT:
            raise LatentError(f"{path}: of another version of this package; encode the clips again")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        manifest = Manifest(**values)
        for name, hint in typing.get_type_hints(Manifest).items():
            value = getattr(manifest, name)
            counts = value if isinstance(value, tuple) else (value,)
            least = 1 if name in ("channels", "factor", "text_channels", "text_length") else -math.inf
            if not fits(value, hint) or any(not least <= n < math.inf for n in counts if not isinstance(n, str)):
                raise ValueError(f"{name} is {value!r}")
        return manifest
    except FileNotFoundError:
        if not folder.is_dir():
            raise LatentError(f"no such folder: {folder}") from None
        raise LatentError(f"{folder} has no {MANIFEST}: it is not a folder that zoo.video.encode wrote") from None
    except LatentError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LatentError(f"{path}: damaged: {error}; encode the clips into a new folder") from None


def refuse_other_encoders(folder: Path, of_folder: Manifest, of_run: Manifest) -> None:
    """Raise a LatentError if a folder with the manifest `of_folder` has other encoders than a run with `of_run`."""
    for encoder in ("vae", "text", "pooled", "image"):
        path, known = f"{encoder}_path", f"{encoder}_hash"
        if getattr(of_folder, known) != getattr(of_run, known):
            raise LatentError(
                f"{folder} was begun with the {getattr(of_folder, encoder)} at {getattr(of_folder, path)}, "
                f"not with the {getattr(of_run, encoder)} at {getattr(of_run, path)}: "
                "their latents do not go together; take a new folder"
            )
    if of_folder.start != of_run.start:
        raise LatentError(
            f"{folder} was begun {'with' if of_folder.start else 'without'} first frames; take a new folder"
        )
    if of_folder.text_length != of_run.text_length:
        raise LatentError(
            f"{folder} was begun for captions of at most {of_folder.text_length} tokens, not {of_run.text_length}: "
            f"go on with --text-length {of_folder.text_length}, or take a new folder"
        )
