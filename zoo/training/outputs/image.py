"""The pictures of an image model: images drawn value by value, baselines by histograms; and what infer.py draws."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.sampling import generator, hash_seed
from zoo.image.autoregressive import sample
from zoo.image.histogram import neighbour_bits, pixel_bits
from zoo.pictures import save_png
from zoo.training import task
from zoo.training.ranks import on_first_rank
from zoo.training.task import Baseline
from zoo.training.tasks.image import Task

SAMPLES = hash_seed("samples")


class Show(task.Show):
    """A grid of images, of class 0, 1, ... in turn."""

    task: Task

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> Tensor:
        """Images (b c h w) from fixed noise, of class 0, 1, ... in turn."""
        labels = [i % self.task.classes for i in range(self.config.sample.images)]
        return self.draw(model, labels, SAMPLES, self.config.sample.temperature, device, on_step)

    def draw(
        self,
        model: Callable[..., Any],
        labels: Sequence[int],
        seed: int,
        temperature: float,
        device: torch.device,
        on_step: Callable[..., None],
    ) -> Tensor:
        """An image of each label, all at once. The noise of an image depends only on `seed` and on its index."""
        noise = torch.empty(len(labels), *self.task.shape, self.task.levels_of_grey)
        for i, one in enumerate(noise):
            one.exponential_(generator=generator("gumbel", seed, i))
        conditions = {"label": torch.tensor(labels, device=device)} if self.task.conditional else {}
        ranks = self.task.mesh.size() if self.task.mesh else dist.get_world_size()
        begin = getattr(model, "drawing", None) if ranks == 1 else None  # ranks cannot divide a single row
        drawing = begin() if begin else None
        return sample(model, temperature * -noise.log().to(device), on_step, drawing, **conditions).cpu()

    def write(self, samples: Tensor, path: Path) -> Mapping[str, float]:
        whole_rows = [n for n in range(2, 11) if len(samples) % n == 0]
        save_png(path, samples / (self.task.levels_of_grey - 1), columns=max(whole_rows, default=None))
        return {}

    def baselines(self, objective: Any) -> list[Baseline]:
        if not self.config.eval.baselines:
            return []
        train = torch.stack([self.task.train.image(i)[0] for i in range(len(self.task.train))])
        judged = torch.stack([self.task.validation.image(i)[0] for i in self.task.judged()])
        pixel, neighbour = (f(train, judged, self.task.levels_of_grey) for f in (pixel_bits, neighbour_bits))
        return [
            Baseline("baseline_pixel", "independent pixels, a histogram for each", pixel),
            Baseline("baseline_neighbour", "histograms given the pixels left and above", neighbour),
        ]


class Infer(task.Infer):
    """Draws images and writes them as one grid."""

    show: Show
    task: Task

    def arguments(self, parser: ArgumentParser) -> None:
        options = self.config.sample
        parser.add_argument(
            "--label", type=int, nargs="+", help=f"an image of each class given, 0 to {self.task.classes - 1}"
        )
        parser.add_argument("--images", type=int, default=options.images, help="or this many images")
        parser.add_argument("--temperature", type=float, default=options.temperature, help="of the noise")
        parser.add_argument("--seed", type=int, default=0, help="another number gives other images")

    def run(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        conditional, classes = self.task.conditional, self.task.classes
        if options.label and not (conditional and all(0 <= label < classes for label in options.label)):
            known = f"the classes are 0 to {classes - 1}" if conditional else "the model knows no classes"
            raise ValueError(f"--label {' '.join(map(str, options.label))}: {known}")
        if options.images < 1:
            raise ValueError(f"--images {options.images}: must be at least 1")
        labels = options.label or [i % classes for i in range(options.images)]
        seed = hash_seed("inference", options.seed)
        self.results = images = self.show.draw(model, labels, seed, options.temperature, device, on_step)
        path = options.out / f"seed-{options.seed}.png"
        on_first_rank(lambda: self.show.write(images, path) and None)
        return [path]
