"""The sections of a configuration that every run has; data, objective, eval and sample are those of its task."""

# ruff: noqa: RUF009 (`option` makes a dataclasses.field)
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from dsp.embedded import METHODS


def option(default: Any, help: str, **checks: Any) -> Any:
    """A field with its help. `choices=`, `least=`, `most=` and `length=` are checked once all layers are merged.

    `file=True`: it names a file or folder, and its path is made absolute when the configuration is loaded.
    """
    return field(default_factory=lambda: copy(default), metadata={"help": help, **checks})


@dataclass
class Model:
    name: str = option("transformer2d", "a model of the zoo")
    size: str | None = option(None, "named size of the model; null for its default")
    overrides: dict[str, Any] = option({}, "fields of the model's config: hidden, depth, heads, ...")


@dataclass
class Init:
    weights: str | None = option(
        None, "initial weights: safetensors, a folder of them or of diffusers; null: random", file=True
    )
    adapter: str | None = option(
        None,
        "initial adapters, a file of diffusers or peft; without lora.rank they are added to the weights",
        file=True,
    )


@dataclass
class Lora:
    rank: int = option(0, "LoRA rank (peft); only the adapters are then trained; 0: no LoRA", least=0)
    alpha: float = option(16.0, "LoRA scale is alpha / rank", least=0)
    targets: list[str] = option(["*"], "linear layers that get an adapter, as patterns of names: '*.qkv'")


@dataclass
class Parallel:
    dp_replicate: int = option(1, "groups that each hold all weights (HSDP)", least=1)
    dp_shard: int = option(1, "groups that take other samples and share the weights (FSDP)", least=1)
    sp: int | None = option(None, "ranks that share one sample; null: all remaining ranks", least=1)
    method: str = option(
        "dsp", "sequence-parallel method in training; all but dsp communicate inside stages (docs/embedded.md)",
        choices=tuple(METHODS),
    )  # fmt: skip
    save_exchanges: bool = option(
        False, "with checkpoint_activations: keep what ulysses or ring received in a stage, instead of sending it again"
    )
    wire: Any = option(
        "same", "type of what a switch sends: same, bf16, fp8 or int8; {forward: fp8, backward: bf16} sets each "
        "direction (docs/wire.md); auto, only with parallel=auto: fewer bits where that saves time",
    )  # fmt: skip
    route: str = option(
        "direct", "how switches travel if sp spans nodes: direct; hierarchical, within nodes first; rounds, to one "
        "rank after the other; auto, the quickest for each size by measured links (docs/routes.md)",
    )  # fmt: skip
    overlap: Any = option(
        None, "2, 3 or 4: switches are cut into so many pieces, which travel while the stage before computes; auto: "
        "where that saves time by measured links; null: off (docs/overlap.md)",
    )  # fmt: skip
    memory: float | None = option(
        None, "GiB of a device for dry_run's advice; null: that of hardware.device, else 80", least=0
    )  # fmt: skip
    auto: bool = option(
        False,
        "choose dp_shard, sp, method and train.checkpoint_activations for the shortest step, and those of wire, "
        "route and overlap that are auto; parallel=auto is the same",
    )


@dataclass
class Hardware:
    device: str | None = option(None, "a100, h100, h200, b200 or l40s: dry_run=true predicts the time of a step on it")
    products: float = option(0.5, "share of the device's peak FLOP/s that matrix products reach", least=0, most=1)
    stream: float = option(0.8, "share of the memory bandwidth that other operations reach", least=0, most=1)
    link: str | None = option(None, "link within a node, a name in dsp.LINKS; null: the device's own")
    network: str | None = option(None, "link between nodes, a name in dsp.LINKS; null: the device's own")
    node: int = option(8, "devices in a node", least=1)


@dataclass
class Optim:
    name: str = option(
        "adamw", "optimizer; adamw8bit: moments in 8 bits (torchao)", choices=("adamw", "adamw8bit", "muon")
    )  # fmt: skip
    lr: float = option(1e-4, "peak learning rate", least=0)
    betas: list[float] = option([0.9, 0.99], "AdamW's decay of the two moments", length=2)
    eps: float = option(1e-8, "AdamW's epsilon", least=0)
    weight_decay: float = option(0.0, "decay of matrices; vectors are not decayed", least=0)
    warmup: int = option(100, "steps of linear warm-up", least=0)
    schedule: str = option(
        "cosine", "learning-rate schedule after the warm-up", choices=("cosine", "linear", "constant", "wsd")
    )
    final: float = option(0.0, "final learning rate of cosine, linear and wsd, as a share of lr", least=0)
    decay: float = option(0.2, "share of all steps in which wsd decays, at the end", least=0, most=1)


@dataclass
class Train:
    steps: int = option(1000, "optimizer steps", least=1)
    batch: int = option(1, "samples a data-parallel group takes at once", least=1)
    accumulation: int = option(1, "batches whose gradients are averaged in a step", least=1)
    precision: str = option(
        "fp32", "type of the computation; weights, reductions and optimizer moments stay fp32", choices=("fp32", "bf16")
    )
    clip: float = option(1.0, "largest gradient norm; 0 for no limit", least=0)
    ema: float = option(
        0.0,
        "decay of the moving average of weights, with which validation and samples run; 0: no average",
        least=0,
        most=1,
    )
    timeout: float = option(600.0, "seconds after which a hanging or silent rank ends the run", least=1, most=1e7)
    seed: int = option(0, "seed of weights, sample order, noise and dropout", least=0)
    checkpoint_activations: str = option(
        "none", "modules whose activations backward recomputes", choices=("none", "stages", "blocks", "both")
    )
    compile: bool = option(False, "compile the inside of every stage with torch.compile")
    skip: int = option(2, "consecutive steps that may be skipped because of a NaN, an infinity or a spike", least=0)
    spike: float = option(
        0.0, "a gradient norm this many times the median of the last 100 is a spike; 0: no check", least=0
    )
    ahead: bool | None = option(
        None, "take a step before its loss is on the host; the device skips a bad step; null: with AdamW on CUDA"
    )
    offload: bool = option(False, "keep weights, gradients and moments in host memory, where the optimizer runs")
    sound: int = option(
        0, "steps between copies to host memory of the weights, if the loss is finite; 0: none", least=0
    )
    workers: int = option(0, "processes a rank that make batches; 0: a thread makes them", least=0)
    prefetch: int = option(1, "batches that each worker, or the thread, makes ahead", least=1)


@dataclass
class Log:
    every: int = option(10, "steps between log lines and records", least=1)
    tensorboard: bool = option(False, "also write event files for TensorBoard")


@dataclass
class Checkpoint:
    every: int = option(1000, "steps between checkpoints; 0 for only the last step", least=0)
    keep: int = option(2, "checkpoints kept", least=1)
    asynchronous: bool = option(False, "write checkpoints in the background, from a copy in host memory")


@dataclass
class Profile:
    steps: str | None = option(None, "first and last step to trace, as 10:13; null: none")
    memory: bool = option(False, "also record allocations during these steps")
    every: int = option(100, "steps between measurements of the parts of a step, for the log; 0: none", least=0)


@dataclass
class Wandb:
    mode: str = option("disabled", "wandb mode; online needs WANDB_API_KEY", choices=("offline", "online", "disabled"))
    project: str = option("dsp", "wandb project")
    entity: str | None = option(None, "wandb team; null for your default")
