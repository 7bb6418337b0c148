"""The image task: whole numbers, their likelihood in bits, and samples drawn value by value.

Every batch is a pure function of the step, and a rank takes only the rows it holds. Letters: b samples, c channels,
h w rows and columns, k levels of a value.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.data.digits import DigitImages
from zoo.data.sampling import generator, hash_seed, order
from zoo.image.autoregressive import BitsPerDim, sample
from zoo.image.grid import save_png
from zoo.image.histogram import neighbour_bits, pixel_bits
from zoo.training import UserError, task
from zoo.training.config import option
from zoo.training.ranks import on_first_rank
from zoo.training.task import Floor, Inputs, Part, share

_SAMPLES = hash_seed("samples")


@dataclass
class Digits:
    name: str = option("digit_images", "handwritten digits, 8 x 8 pixels with 17 levels of grey")


DATA: dict[str, type] = {"digit_images": Digits}


@dataclass
class Objective:
    name: str = option("bits_per_dim", "the loss: minus the log-likelihood, in bits a value", choices=("bits_per_dim",))


@dataclass
class Eval:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    images: int = option(96, "validation images, the same at every validation", least=1)
    floors: bool = option(False, "also fit histograms to the data, for comparison")


@dataclass
class Sample:
    every: int = option(0, "steps between sampled images; 0 for none", least=0)
    images: int = option(10, "images sampled, from the same noise every time", least=1)
    temperature: float = option(1.0, "1 draws from what was learned, less from its likelier part", least=0)


class Task(task.Task):
    """Autoregressive images: `rank` of `size` holds a range of the rows of each."""

    def __init__(self, config: Any, rank: int = 0, size: int = 1):
        super().__init__(config, rank, size)
        self.shape, self.levels_of_grey, self.classes = DigitImages.shape, DigitImages.levels, DigitImages.num_classes
        self.validation_samples = config.eval.images
        self.tokens = prod(self.shape)
        self.here = share(self.shape[1], rank, size)

    def open(self) -> None:
        self.train, self.validation = on_first_rank(lambda: (DigitImages("train"), DigitImages("validation")))
        if self.validation_samples > len(self.validation):
            raise UserError(f"eval.images={self.validation_samples}: there are {len(self.validation)}")

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        model = self.create()
        config, (channels, height, width) = model.config, self.shape
        if not hasattr(config, "levels"):
            raise UserError(f"model {self.config.model.name} is not an autoregressive model of images")
        wanted = {"levels": self.levels_of_grey, "channels": channels}
        for key, value in wanted.items():
            if getattr(config, key) != value:
                raise UserError(f"the data has {value} {key} and the model {getattr(config, key)}: "
                                f"set model.overrides.{key}={value}")  # fmt: skip
        if config.height < height or config.width < width:
            raise UserError(f"the images are {height} x {width}: set model.overrides.height and width to as much")
        if config.num_classes not in (None, self.classes):
            raise UserError(f"the data has {self.classes} classes and the model {config.num_classes}")
        self.conditional = config.num_classes is not None
        return model

    def objective(self, model: nn.Module) -> nn.Module:
        return {"bits_per_dim": BitsPerDim}[self.config.objective.name](model)

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Tensor]:
        b = self.config.train.batch
        inputs = {"image": torch.empty(b, *self.shape, dtype=torch.long)}
        return inputs | ({"label": torch.empty(b, dtype=torch.long)} if self.conditional else {})

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        chosen = self.drawn(step, micro, group, groups, len(self.train))
        return self._inputs(self.train, [index for _, index in chosen])

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        chosen = self._judged()[group::groups]
        for start in range(0, len(chosen), self.config.train.batch):
            batch = chosen[start : start + self.config.train.batch]
            yield 0, len(batch), self._inputs(self.validation, batch)

    def _judged(self) -> list[int]:
        """The validation images."""
        return order(0, 0, len(self.validation))[: self.validation_samples].tolist()

    def _inputs(self, data: DigitImages, indices: Sequence[int]) -> Inputs:
        images, labels = zip(*(data.image(index, self.here) for index in indices))
        inputs: Inputs = {"image": Part(torch.stack(images), 2, self.shape[1])}
        return inputs | ({"label": torch.tensor(labels)} if self.conditional else {})

    # ------------------------------------------------------------------------------------------------- what is shown

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> Tensor:
        """Images (b c h w) from fixed noise, of class 0, 1, ... in turn."""
        labels = [i % self.classes for i in range(self.config.sample.images)]
        return self._draw(model, labels, _SAMPLES, self.config.sample.temperature, device, on_step)

    def _draw(
        self,
        model: Callable[..., Any],
        labels: Sequence[int],
        seed: int,
        temperature: float,
        device: torch.device,
        on_step: Callable[..., None],
    ) -> Tensor:
        """An image of each label, all at once. The noise of an image depends on `seed` and on its place alone."""
        noise = torch.empty(len(labels), *self.shape, self.levels_of_grey)
        for i, one in enumerate(noise):
            one.exponential_(generator=generator("gumbel", seed, i))
        given = {"label": torch.tensor(labels, device=device)} if self.conditional else {}
        return sample(model, temperature * -noise.log().to(device), on_step, **given).cpu()

    def show(self, samples: Tensor, path: Path) -> Mapping[str, float]:
        whole_rows = [n for n in range(2, 11) if len(samples) % n == 0]
        save_png(path, samples / (self.levels_of_grey - 1), columns=max(whole_rows, default=None))
        return {}

    def arguments(self, parser: ArgumentParser) -> None:
        options = self.config.sample
        parser.add_argument(
            "--label", type=int, nargs="+", help=f"an image of each class given, 0 to {self.classes - 1}"
        )
        parser.add_argument("--images", type=int, default=options.images, help="or this many images")
        parser.add_argument("--temperature", type=float, default=options.temperature, help="of the noise")
        parser.add_argument("--seed", type=int, default=0, help="another number gives other images")

    def infer(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        if options.label and not (self.conditional and all(0 <= label < self.classes for label in options.label)):
            known = f"the classes are 0 to {self.classes - 1}" if self.conditional else "the model knows no classes"
            raise ValueError(f"--label {' '.join(map(str, options.label))}: {known}")
        if options.images < 1:
            raise ValueError(f"--images {options.images}: must be at least 1")
        labels = options.label or [i % self.classes for i in range(options.images)]
        seed = hash_seed("inference", options.seed)
        images = self._draw(model, labels, seed, options.temperature, device, on_step)
        path = options.out / f"seed-{options.seed}.png"
        on_first_rank(lambda: self.show(images, path) and None)
        return [path]

    def describe(self) -> str:
        return "images of {} x {} x {}".format(*self.shape)

    def floors(self, objective: Any) -> list[Floor]:
        if not self.config.eval.floors:
            return []
        train = torch.stack([self.train.image(i)[0] for i in range(len(self.train))])
        judged = torch.stack([self.validation.image(i)[0] for i in self._judged()])
        pixel, neighbour = (f(train, judged, self.levels_of_grey) for f in (pixel_bits, neighbour_bits))
        return [
            Floor("pixel_floor", "independent pixels, a histogram for each", pixel),
            Floor("neighbour_floor", "histograms given the pixels left and above", neighbour),
        ]
