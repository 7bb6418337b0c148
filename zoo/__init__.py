"""Multi-dimensional models as plain single-device PyTorch, each with a ``stages`` dict that says what it computes over.

import zoo

model = zoo.create("transformer2d", "720m", block="stdit")
model(**model.example_inputs(frames=16, height=32, width=32))

run = zoo.load("runs/demo")  # a trained model, on one process or on all ranks of a torchrun
clips = run.sample(label=[3, 7], frames=16)

pipe = zoo.pipeline("Wan2.1-T2V-1.3B-Diffusers")  # published weights, in a folder as diffusers saves it
clips = pipe.sample("a boat on a lake")
"""

from typing import Any

from zoo.registry import create, from_export, from_reference, list_models, sizes


def load(path: Any, *, averaged: bool = True, wire: str = "same") -> Any:
    """The trained model of a run's directory, or of one of its checkpoints: a `zoo.training.trained.Run`.

    averaged: use the moving average of the weights, if the run kept one. The model is restored on every rank; without
    torchrun, this process is the only rank. wire: the format in which ranks send activations to one another, as for
    `dsp.parallelize`. ValueError: no run, no sound checkpoint, or a checkpoint of another model.
    """
    from zoo.training.trained import Run  # it imports dsp, configurations and checkpoints, which models do not need

    return Run(path, averaged=averaged, wire=wire)


def pipeline(
    folder: Any,
    *,
    dtype: str | None = None,
    scheduler: str | None = None,
    shift: float | None = None,
    branches: bool = False,
    wire: str = "same",
    variant: str | None = None,
    lora: Any = (),
    lora_scale: float = 1.0,
) -> Any:
    """The published video model in a folder as diffusers saves a pipeline, on one process or all ranks of a torchrun.

    The families are Wan, Latte, and STDiT (with its own weights in `transformer/`). The folder also has `vae/`,
    `text_encoder/`, `tokenizer/` and `scheduler/`; nothing is downloaded. dtype: fp32, bf16 or fp16; None: the dtype
    that the family was published for. scheduler: the class of another scheduler of diffusers; shift: the shift of its
    noise levels. branches: half of the ranks compute each of the two predictions of guidance. wire: the format in which
    ranks send activations to one another, as for `dsp.parallelize`. variant: of the weights, such as fp16, in the parts
    that have it; the transformer must. lora: a file or folder of adapters, or several, one for each transformer, which
    are added `lora_scale` times. ValueError: a part is missing, damaged or unknown.
    """
    from zoo.training.pipeline import Pipeline

    return Pipeline(
        folder, dtype=dtype, scheduler=scheduler, shift=shift, branches=branches, wire=wire, variant=variant,
        lora=lora, lora_scale=lora_scale,
    )  # fmt: skip


__all__ = ["create", "from_export", "from_reference", "list_models", "load", "pipeline", "sizes"]
