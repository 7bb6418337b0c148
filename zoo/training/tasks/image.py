"""The image task: pixels as integers, their likelihood in bits, and samples drawn value by value.

Every batch is a pure function of the step, and a rank takes only the rows it holds. Letters: b samples, c channels,
h w rows and columns, k levels of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zoo.data.digits import DigitImages
from zoo.data.sampling import order
from zoo.image.autoregressive import BitsPerDim
from zoo.training import UserError, task
from zoo.training.ranks import on_first_rank
from zoo.training.sections import option
from zoo.training.task import Inputs


@dataclass
class Digits:
    name: str = option("digit_images", "handwritten digits, 8 x 8 pixels with 17 levels of grey")


DATA: dict[str, type] = {"digit_images": Digits}


@dataclass
class Objective:
    name: str = option("bits_per_dim", "loss: negative log-likelihood in bits a value", choices=("bits_per_dim",))


@dataclass
class Eval:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    images: int = option(96, "validation images, the same at every validation", least=1)
    baselines: bool = option(False, "also report histograms fitted to the data, as a baseline")


@dataclass
class Sample:
    every: int = option(0, "steps between sampled images; 0 for none", least=0)
    images: int = option(10, "images to sample, always from the same noise", least=1)
    temperature: float = option(1.0, "sampling temperature; below 1 favours likely values", least=0)


class Task(task.Task):
    """Autoregressive images: a rank holds a range of the rows of each."""

    sharded_inputs = {"image": 2}

    def __init__(self, config: Any, *devices: Any):
        super().__init__(config, *devices)
        self.shape, self.levels_of_grey, self.classes = DigitImages.shape, DigitImages.levels, DigitImages.num_classes
        self.validation_samples = config.eval.images
        self.tokens = prod(self.shape)

    def open(self) -> None:
        self.train, self.validation = on_first_rank(lambda: (DigitImages("train"), DigitImages("validation")))
        if self.validation_samples > len(self.validation):
            count = len(self.validation)
            raise UserError(f"eval.images={self.validation_samples}: the validation set has {count} images")

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
            raise UserError(f"the images are {height} x {width}: set model.overrides.height and width to at least that")
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

    def samples(self, chosen: Sequence[tuple[int, int]], training: bool) -> Inputs:
        data, places = (self.train, range(len(self.train))) if training else (self.validation, self.judged())
        images, labels = zip(*(data.image(places[i], self.local_range(self.shape[1])) for _, i in chosen))
        inputs: Inputs = {"image": self.local_shard("image", torch.stack(images), self.shape[1])}
        return inputs | ({"label": torch.tensor(labels)} if self.conditional else {})

    def judged(self) -> list[int]:
        """The indices of the validation images."""
        return order(0, 0, len(self.validation))[: self.validation_samples].tolist()

    def describe(self) -> str:
        return "images of {} x {} x {}".format(*self.shape)
