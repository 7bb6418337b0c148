"""The sections of a configuration that every run has; data, objective, eval and sample are those of its task."""

# ruff: noqa: RUF009 (`option` makes a dataclasses.field)
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from dsp.embedded import METHODS


def option(default: Any, help: str, **checks: Any) -> Any:
    """A field with its comment. `choices=`, `least=`, `most=` and `length=` are checked once all layers are merged.

    `file=True`: it names a file or folder, which is found from elsewhere, too, once the configuration is loaded.
    """
    return field(default_factory=lambda: copy(default), metadata={"help": help, **checks})


@dataclass
class Model:
    name: str = option("transformer2d", "a model of the zoo")
    size: str | None = option(None, "a named size of it; null for the model's default")
    overrides: dict[str, Any] = option({}, "fields of the model's own config: hidden, depth, heads, ...")


@dataclass
class Init:
    weights: str | None = option(
        None, "begin with these: safetensors, a folder of them or of diffusers; null: drawn", file=True
    )


@dataclass
class Lora:
    rank: int = option(0, "of adapters (peft), which are all that is trained; 0 for none", least=0)
    alpha: float = option(16.0, "their scale is alpha / rank", least=0)
    targets: list[str] = option(["*"], "the linear layers that get one, as patterns of names: '*.qkv'")


@dataclass
class Parallel:
    dp_replicate: int = option(1, "groups that hold a whole copy of the weights (HSDP)", least=1)
    dp_shard: int = option(1, "groups that each take other samples and share the weights (FSDP)", least=1)
    sp: int | None = option(None, "ranks that share one sample; null for all that are left", least=1)
    method: str = option(
        "dsp", "of sequence parallelism in training; others than DSP act inside stages (docs/embedded.md)",
        choices=tuple(METHODS),
    )  # fmt: skip
    save_exchanges: bool = option(False, "with checkpoint_activations: keep what ulysses or ring exchanged in a stage")
    memory: float | None = option(
        None, "GiB of a device, for the advice of dry_run; null for hardware.device's, or else 80", least=0
    )  # fmt: skip


@dataclass
class Hardware:
    device: str | None = option(None, "a100, h100, h200, b200, l40s: dry_run=true says how long a step takes there")
    products: float = option(0.5, "share of its peak that matrix products reach", least=0, most=1)
    stream: float = option(0.8, "share of its memory's rate that operations reach", least=0, most=1)
    link: str | None = option(None, "within a node, a name in dsp.LINKS; null for what the device has")
    network: str | None = option(None, "between nodes, likewise")
    node: int = option(8, "devices of a node", least=1)


@dataclass
class Optim:
    name: str = option("adamw", "the optimizer", choices=("adamw", "muon"))
    lr: float = option(1e-4, "peak learning rate", least=0)
    betas: list[float] = option([0.9, 0.99], "AdamW's decay of the two moments", length=2)
    eps: float = option(1e-8, "AdamW's epsilon", least=0)
    weight_decay: float = option(0.0, "decay of matrices; vectors are not decayed", least=0)
    warmup: int = option(100, "steps of linear warm-up", least=0)
    schedule: str = option("cosine", "of lr after the warm-up", choices=("cosine", "linear", "constant", "wsd"))
    final: float = option(0.0, "where cosine, linear and wsd end, as a share of lr", least=0)
    decay: float = option(0.2, "share of all steps over which wsd goes down, at the end", least=0, most=1)


@dataclass
class Train:
    steps: int = option(1000, "optimizer steps", least=1)
    batch: int = option(1, "samples a data-parallel group takes at once", least=1)
    accumulation: int = option(1, "such batches a step", least=1)
    precision: str = option("fp32", "of the computation; weights, sums and moments stay fp32", choices=("fp32", "bf16"))
    clip: float = option(1.0, "largest gradient norm; 0 for no limit", least=0)
    ema: float = option(0.0, "decay of the averaged weights that are judged and shown; 0 for none", least=0, most=1)
    timeout: float = option(600.0, "seconds until a rank that hangs or does not answer ends the run", least=1, most=1e7)
    seed: int = option(0, "decides weights, sample order, noise and dropout", least=0)
    checkpoint_activations: str = option(
        "none", "what backward recomputes instead of keeping its inside", choices=("none", "stages", "blocks", "both")
    )
    compile: bool = option(False, "torch.compile the inside of every stage")
    skip: int = option(2, "steps in a row that may be skipped, for a loss that is no number or a spike", least=0)
    spike: float = option(0.0, "a gradient norm so many times the median of 100 is a spike; 0 for none", least=0)
    sound: int = option(
        0, "steps between copies, in the host's memory, of weights whose loss is finite; 0: none", least=0
    )
    workers: int = option(0, "processes beside each rank that make batches; 0 for a thread", least=0)
    prefetch: int = option(1, "batches made ahead, by each of the processes", least=1)


@dataclass
class Log:
    every: int = option(10, "steps between log lines and records", least=1)
    tensorboard: bool = option(False, "write event files for TensorBoard, too")


@dataclass
class Checkpoint:
    every: int = option(1000, "steps between checkpoints; 0 for the last step alone", least=0)
    keep: int = option(2, "checkpoints kept", least=1)
    asynchronous: bool = option(False, "go on training while one is written: a copy in the host's memory")


@dataclass
class Profile:
    steps: str | None = option(None, "first and last step to trace, as 10:13 (in a file '10:13'); null for none")
    memory: bool = option(False, "record, over the same steps, what memory was taken for")
    every: int = option(100, "steps between those that are timed by their parts, for the log; 0 for none", least=0)


@dataclass
class Wandb:
    mode: str = option("disabled", "online needs WANDB_API_KEY", choices=("offline", "online", "disabled"))
    project: str = option("dsp", "wandb project")
    entity: str | None = option(None, "wandb team; null for your default")
