"""A trained model in Python, on one process or all ranks of a `torchrun`: what infer.py does, without a command line.

    import zoo
    run = zoo.load("runs/demo")
    clips = run.sample(label=[3, 7], frames=16)      # what infer.py writes, as tensors too

All ranks share each sample (sp = all of them), and the result does not depend on how many there are.
"""

import sys
import time
import weakref
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dsp
from zoo.training import UserError, checkpoint, ranks, user_error
from zoo.training import config as cfg
from zoo.training.model import initialize
from zoo.training.task import Infer, Task
from zoo.training.task_lookup import create_infer, create_task
from zoo.training.tracking import duration, names_of

NAMED = 12  # files that are named one by one, at most
QUIET = 20  # seconds between two lines on progress, if stderr is no terminal


def locate(path: Path) -> tuple[Path, Path, int | None]:
    """The directories of a run and of its checkpoints, and the step of `path` (None: the latest sound one)."""
    step = None
    if path.name.startswith("step-"):
        known = {p: step for step, p in checkpoint.finished(path.parent)}
        if path not in known:
            raise UserError(f"{path} is not a checkpoint; beside it there are: {', '.join(p.name for p in known)}")
        step, path = known[path], path.parent
    run = path.parent if path.name == "checkpoints" else path
    if not run.exists():
        raise UserError(f"no such folder: {run}")
    if not (run / "config.yaml").is_file():
        text = f"{run} holds no config.yaml: expected the directory of a run, or one of its checkpoints"
        for path in sorted(run.glob("*")):
            if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
                raise UserError(f"{text}. {path.name} may run code and is not read: write its weights as safetensors")
        raise UserError(text)
    return run, run / "checkpoints", step


def restored(task: Task, directory: Path, step: int | None, device: torch.device, averaged: bool = True) -> nn.Module:
    """The task's model with the weights of a checkpoint, in full on every rank, and not parallelized yet."""
    with torch.device("meta"):
        model = task.model()
    if task.config.lora.rank:  # the checkpoint has only the adapters: the run began with these weights
        initialize(model, task, device)
    else:
        model.to_empty(device=device)
    wanted = checkpoint.Contents(model, identity=task.identity)
    state = checkpoint.load(directory, wanted, step=step, averaged=averaged, report=ranks.log0)
    if state is None:
        raise UserError(f"{directory} holds no checkpoint")
    which = "averaged weights" if state["averaged"] else "weights"
    ranks.log0(f"{which} of step {state['step']} from {directory}")
    return model


def load_model(
    task: Task, directory: Path, step: int | None, device: torch.device, averaged: bool = True, wire: str = "same"
) -> nn.Module:
    """The task's predictor with the weights of a checkpoint, parallelized over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("sp",))
    predictor = task.predictor(restored(task, directory, step, device, averaged))
    user_error(dsp.parallelize, predictor, mesh["sp"], wire=wire)
    return predictor.eval()


def log_written(files: Sequence[Path], before: Collection[Path]) -> None:
    """Log each file as written, or as replacing one that was there before; of many, how many."""
    if len(files) > NAMED:
        replacing = sum(path in before for path in files)
        replaced = f", of which {replacing} replaced one" if replacing else ""
        ranks.log0(f"wrote {len(files)} files to {files[0].parent}{replaced}")
        return
    for path in files:
        ranks.log0(f"{'replaced' if path in before else 'wrote'} {path}")


def progress(clock: Callable[[], float] = time.perf_counter) -> Callable[..., None]:
    """A function that shows the progress of a long job on rank 0: in one line on a terminal, else now and then."""
    began = said = clock()
    first, terminal = dist.get_rank() == 0, sys.stderr.isatty()

    def on_step(step: int, steps: int) -> None:
        nonlocal said
        now = clock()
        if not first or not (terminal or now - said > QUIET):
            return
        said, eta = now, duration((now - began) / step * (steps - step))
        begin, end = ("\r", "\n" if step == steps else "") if terminal else ("", "\n")
        print(f"{begin}{step}/{steps}  {eta} left ", end=end, file=sys.stderr, flush=True)

    return on_step


def arguments(parser: ArgumentParser, infer: Infer, out: Path) -> None:
    """Add the options of infer.py for a run, which `Run.sample` takes by the same names."""
    parser.add_argument("--out", type=Path, default=out, help="directory for the results")
    parser.add_argument(
        "--weights", choices=("averaged", "last"), default="averaged",
        help="the moving average of the weights, if the run kept one (train.ema), or the last ones",
    )  # fmt: skip
    infer.arguments(parser)


def wire_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--wire", choices=("same", "bf16", "fp8", "int8"), default="same",
        help="what ranks send activations in; in fewer bits, results depend on the number of ranks",
    )  # fmt: skip


def namespace(parser: ArgumentParser, options: Mapping[str, Any], but: str) -> Namespace:
    """Options by name, with the parser's defaults. A UserError names an unknown one; `but` counts as unknown."""
    known = {action.dest: action.default for action in parser._actions if action.dest not in ("help", but)}
    if unknown := sorted(options.keys() - known.keys()):
        raise UserError(f"sample: no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    chosen = Namespace(**{name: value for name, value in known.items() if value != SUPPRESS} | dict(options))
    chosen.out = chosen.out and Path(chosen.out)
    return chosen


class Run:
    """A trained model that is ready to be used. `close` ends the process group, if `load` began one.

    model: the module that the task's samplers call, parallelized over all ranks; config, task: those of the run.
    """

    def __init__(self, path: str | Path, *, averaged: bool = True, wire: str = "same"):
        self.directory, checkpoints, step = locate(Path(path))
        self.config = cfg.load([str(self.directory / "config.yaml")])
        self.task = create_task(self.config)
        self.infer = create_infer(self.task, names_of(self.directory))
        stack = ExitStack()
        self.close = weakref.finalize(self, stack.close)
        self.device = stack.enter_context(ranks.process_group())
        self.model = load_model(self.task, checkpoints, step, self.device, averaged, wire)
        self.files: list[Path] = []

    def sample(self, *files: str | Path, **options: Any) -> Any:
        """Make samples with these options, such as ``label=[3, 7], frames=16`` or, for proteins, files.

        Clips are (n c t y x) uint8, images (n c h w), predictions of proteins a list; on rank 0, None elsewhere. The
        files that infer.py writes are written too, under `out`, and named in `files`. A UserError names a wrong option.
        """
        parser = ArgumentParser()
        arguments(parser, self.infer, self.directory / "inference")
        chosen = namespace(parser, options, but="weights")
        chosen.files = [Path(file) for file in files]
        with torch.no_grad():
            self.files = user_error(self.infer.run, self.model, chosen, self.device, progress())
        return self.infer.results if dist.get_rank() == 0 else None
