"""The configuration of a run, in layers: typed defaults < base files < a YAML file < the command line.

`load(["configs/demo.yaml", "train.steps=10"])` merges the layers one at a time, so that an error names the layer that
is wrong. An unknown key is an error with a suggestion, a wrong type is an error, and nothing is read from the
environment. Only `model.name`, `data.name` and `task` can import code: a part of your own that you name
(`zoo.plugins`). `data` has the keys of the data set that it names, `objective`, `eval` and `sample` those of its task,
and `model.overrides` those of the model.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dsp import Route
from dsp.comm.wire import Wire
from dsp.overlap import overlap_of
from zoo.files import read_bytes
from zoo.training import UserError, one_line, user_error, values
from zoo.training.sections import (
    Checkpoint,
    Hardware,
    Init,
    Log,
    Lora,
    Model,
    Optim,
    Parallel,
    Profile,
    Train,
    Wandb,
    option,
)
from zoo.training.task_lookup import TASKS, TaskLookup

USAGE = """usage: train.py CONFIG.yaml [key=value ...]

    dsp-launch --nproc-per-node 2 train.py configs/demo.yaml
    train.py configs/demo.yaml train.steps=100 parallel.sp=1
    train.py configs/demo.yaml help=1          every key, its meaning and its value
    train.py data.name=video_folder help=1     the keys of another data set
    train.py configs/demo.yaml dry_run=true    the plan, memory, bytes (and time) a rank; nothing is allocated
    dsp-launch --nproc-per-node 2 train.py configs/demo.yaml check=true    are the ranks equal to one process?"""


Layer = dict[str, Any]  # a file, or an argument of the command line
MOST_BYTES = 1 << 20  # of a YAML file
TASK_SECTIONS = ("data", "task", "objective", "eval", "sample")
PACKAGED = Path(__file__).parents[1] / "cli"  # a wheel has configs/ there


@dataclass
class Config:
    name: str | None = option(None, "name of the run; null: the name of the file")
    runs_dir: str = option("runs", "folder of runs; files go to <runs_dir>/<name>/")
    resume: bool = option(False, "continue the run of this name from its latest intact checkpoint")
    dry_run: bool = option(False, "print plan, memory, bytes and (with hardware.device) time a rank; allocate nothing")
    check: bool = option(False, "compare the ranks with one process, by dsp.check on the first batch, and do not train")
    task: str | None = option(
        None, "task that trains on the data, or your own package.module; null: the one of data.name"
    )
    model: Model = field(default_factory=Model)
    init: Init = field(default_factory=Init)
    lora: Lora = field(default_factory=Lora)
    data: Any = field(default_factory=lambda: TaskLookup("digits").options())
    objective: Any = field(default_factory=lambda: TaskLookup("digits").module.Objective())
    parallel: Parallel = field(default_factory=Parallel)
    hardware: Hardware = field(default_factory=Hardware)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    eval: Any = field(default_factory=lambda: TaskLookup("digits").module.Eval())
    sample: Any = field(default_factory=lambda: TaskLookup("digits").module.Sample())
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profile: Profile = field(default_factory=Profile)
    wandb: Wandb = field(default_factory=Wandb)


# ------------------------------------------------------------------------------------------------------------ loading


def load(arguments: Sequence[str], *, shown: bool = False) -> Config:
    """The configuration that a command line asks for; a UserError names the layer, the key and what would be right.

    `shown`: the configuration is only printed, so keys without a default may be missing.
    """
    overrides = [a for a in arguments if "=" in a]
    files = [a for a in arguments if "=" not in a]
    if len(files) != 1:
        raise UserError(f"expected one configuration file, got {files or 'none'}\n{USAGE}")
    OmegaConf.clear_resolver("oc.env")  # a configuration is complete: the environment is not part of it
    config = _merged([*_chain(files[0]), *(("command line", _parse(override)) for override in overrides)])
    nameless = getattr(config.data, "path", "") is None and not getattr(config.data, "mix", None)
    if nameless and not (config.dry_run or shown):
        raise UserError("data.path is not set: it names the folder of your data (data.path=/path/to/it)")
    config.name = config.name or Path(files[0]).stem
    if Path(config.name).name != config.name or config.name == ".." or len(config.name.encode()) > 200:
        raise UserError(f"name={config.name[:60]!r} must be a plain folder name, without slashes, of at most 200 bytes")
    return config


def load_model(path: Path) -> Config:
    """A run's configuration with the default data and task: nothing that it names is imported."""
    return _merged([(str(path), {key: part for key, part in _read(str(path)).items() if key not in TASK_SECTIONS})])


def _merged(layers: Sequence[tuple[str, Layer]]) -> Config:
    """The configuration that layers amount to, checked."""
    names = (layer["data"].get("name") for _, layer in reversed(layers) if isinstance(layer.get("data"), dict))
    data = next((name for name in names if name is not None), "digits")
    task = next((layer["task"] for _, layer in reversed(layers) if layer.get("task") is not None), None)
    schema = merged = OmegaConf.structured(defaults(str(data), None if task is None else str(task)))
    for source, layer in layers:
        merged = _merge(merged, _typed(schema, layer, source), source)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    _make_absolute(config)
    _check_values(config)
    return config


def defaults(data: str, task: str | None = None) -> Config:
    """The default configuration of a run on a data set; a UserError for a data set or a task that does not exist."""
    lookup, names = TaskLookup(data, task), sorted(set(TASKS.values()))
    try:
        module = lookup.module
    except UserError as error:
        if task is None or task in names:
            raise
        raise UserError(f"{error}{_suggest(task, names)}") from None
    sets = (*TASKS, *module.DATA)
    if data not in sets and ":" not in data and not entry_points(group="zoo.data", name=data):
        raise UserError(f"data.name={data}: no such data set{_suggest(data, sets)}; your own is package.module:Class")
    parts = {"objective": module.Objective(), "eval": module.Eval(), "sample": module.Sample()}
    return Config(data=lookup.options(), **parts, task=task)


def _make_absolute(section: Any) -> None:
    """Make paths absolute, so that infer.py or a resumed run finds the files from any folder."""
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            _make_absolute(value)
        elif isinstance(value, dict) and f.metadata.get("file"):
            setattr(section, f.name, {os.path.abspath(path): other for path, other in value.items()})
        elif value is not None and f.metadata.get("file"):
            setattr(section, f.name, os.path.abspath(value))


def load_or_error(arguments: Sequence[str]) -> tuple[Config, UserError | None]:
    """The configuration and None; or the defaults and the error, which the ranks report together."""
    try:
        return load(arguments), None
    except UserError as error:
        return Config(), error


def _chain(path: str) -> list[tuple[str, Layer]]:
    """The file with its path, after the files that it builds on: `base: other.yaml`, relative to its folder."""
    chain: dict[str, Layer] = {}
    while True:
        layer = _read(path)
        if path in chain:
            raise UserError(f"base: {' -> '.join([*chain, path])}: these files build on each other")
        chain[path] = layer
        if "base" not in layer:
            return [*reversed(chain.items())]
        base = layer.pop("base")
        if not isinstance(base, str):
            raise UserError(f"{path}: base: expected the path of one YAML file")
        path = base if os.path.isabs(base) else os.path.normpath(os.path.join(os.path.dirname(path), base))


def _read(path: str) -> Layer:
    try:
        packaged = path.startswith("configs/") and not Path(path).exists() and (PACKAGED / path).is_file()
        layer = values.parse(read_bytes(PACKAGED / path if packaged else Path(path), MOST_BYTES).decode())
    except FileNotFoundError:
        beside = sorted(str(p) for p in Path(path).parent.glob("*.yaml")) if Path(path).parent.is_dir() else []
        raise UserError(f"{path}: no such file{_suggest(path, beside)}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a readable YAML file: {one_line(error)}") from None
    layer = {} if layer is None else layer
    if not isinstance(layer, dict):
        raise UserError(f"{path}: expected keys and values at the top level")
    if layer.get("parallel") == "auto":
        layer["parallel"] = {"auto": True}
    return {key: value for key, value in layer.items() if value is not None or not _is_section(key)}


def _is_section(key: str) -> bool:
    return is_dataclass(getattr(Config(), key, None))


def _parse(override: str) -> Layer:
    """The layer that one argument of the command line is."""
    key, text = override.split("=", 1)
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"command line: {key!r} is not a key; expected key=value, for example train.steps=10")
    _refuse_secret(key, text, "command line")
    if text == "":
        raise UserError(f"command line: {key}= has no value; write {key}=null for none")
    if override == "parallel=auto":  # next to parallel.memory=16, a bare parallel=auto would be lost
        return {"parallel": {"auto": True}}
    value: Any = None if text == "null" else values.Text(text)
    try:
        value = values.parse(text) if _is_section(key) else value
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"command line: {key}: {one_line(error)}") from None
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _merge(base: DictConfig, layer: Layer, source: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, layer)
        OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        message = str(error).split("\n")[0]
        raise UserError(f"{source}: {error.full_key or 'wrong shape'}: {message}") from None
    except TypeError as error:
        raise UserError(f"{source}: {error}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _typed(schema: DictConfig, layer: Layer, source: str, prefix: str = "") -> Layer:
    """A layer whose keys are checked, and whose values are read by the types of their options."""
    checked: Layer = {}
    for key, value in layer.items():
        name = f"{prefix}{key}"
        _refuse_secret(name, str(value), source)
        if key not in schema:
            place = "" if prefix else " at the top level"
            raise UserError(f"{source}: unknown key '{name}'{place}{_suggest(str(key), [str(k) for k in schema])}")
        node: Any = schema._get_node(key)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            if not isinstance(value, dict):
                raise UserError(f"{source}: '{name}' is a section: expected keys under it, got {value}")
            checked[key] = _typed(node, value, source, f"{name}.")
            continue
        for inner in value if isinstance(value, dict) else ():
            _refuse_secret(f"{name}.{inner}", str(value[inner]), source)
        try:
            checked[key] = values.typed(value, node._metadata.ref_type)
        except (ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{source}: {name}={one_line(value)[:60]}: {one_line(error)[:200]}") from None
    return checked


def _check_values(config: Config) -> None:
    for key, value, metadata in leaves(config):
        if value is None:
            continue
        if value not in metadata.get("choices", (value,)):
            raise UserError(f"{key}={value}: no such choice{_suggest(str(value), metadata['choices'])}")
        if any(abs(each) >= 1 << 63 for each in values.integers(value)):
            raise UserError(f"{key}={str(value)[:40]}: an integer has to be below 2^63")
        if "least" in metadata and not value >= metadata["least"]:
            raise UserError(f"{key}={value}: must be at least {metadata['least']}")
        if "most" in metadata and not value <= metadata["most"]:
            raise UserError(f"{key}={value}: must be at most {metadata['most']}")
        if "length" in metadata and len(value) != metadata["length"]:
            raise UserError(f"{key}={value}: expected {metadata['length']} values")
    _check_combinations(config)


def _check_combinations(config: Config) -> None:
    """Raise a UserError for values that are right one by one and do not fit together."""
    try:
        if not (config.parallel.auto and config.parallel.wire == "auto"):
            Wire.of(config.parallel.wire)
        Route.of(config.parallel.route)
        if config.parallel.overlap != "auto":
            overlap_of(config.parallel.overlap)
    except ValueError as error:
        raise UserError(f"parallel.{error}") from None
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise UserError(f"optim.betas={config.optim.betas}: expected numbers in [0, 1)")
    recomputed = config.train.checkpoint_activations
    if config.parallel.save_exchanges and recomputed != "stages":
        raise UserError(f"parallel.save_exchanges needs train.checkpoint_activations=stages, not {recomputed}")
    if config.train.ahead and config.optim.name != "adamw":
        raise UserError("train.ahead=true needs optim.name=adamw: only its kernel can skip a bad step on the device")
    if config.train.ahead and config.train.offload:
        raise UserError("train.ahead=true needs an optimizer on the device: set train.offload=false")
    if config.train.offload and config.parallel.method != "dsp":
        raise UserError(f"train.offload=true works only with parallel.method=dsp, not {config.parallel.method}")
    if (fps := getattr(config.data, "fps", None)) is not None and not fps > 0:
        raise UserError(f"data.fps={fps}: must be more than 0; null for the video's own")
    if (speed := getattr(config.data, "speed", None)) and not 0 <= speed[0] <= speed[1]:
        raise UserError(f"data.speed={speed}: expected the slowest and then the fastest, neither negative")


def _suggest(wrong: str, valid: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(wrong, list(valid), n=1, cutoff=0.5)
    hint = f": did you mean '{close[0]}'?" if close else ""
    return f"{hint} (valid: {', '.join(valid)})" if valid else hint


_SECRET_KEY = re.compile(r"api_?key|secret|passw|credential|private_?key|access_?key|(^|[._])(auth_?)?token$", re.I)
_SECRET_VALUE = re.compile(
    r"""\b[0-9a-f]{40}\b | \b(AKIA|ASIA)[0-9A-Z]{16}\b | \bAIza[\w-]{35}  # wandb, Amazon, Google
    | \b(sk|hf|gh[opusr]|github_pat|wandb_v1)[-_]\w{16,} | \b(sk-proj|sk-ant|glpat|xox[a-z])-[\w-]{16,}
    | \beyJ[\w-]{8,}\.eyJ[\w-]{8,}  # a JSON web token
    | ://[^/\s:@]*:[^/\s@]+@ | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY  # a password in a URL, the header of a key""",
    re.X,
)


def _refuse_secret(key: str, value: str, source: str) -> None:
    """Refuse what looks like a secret, and never echo it: a configuration is saved, logged and uploaded."""
    if _SECRET_KEY.search(key) or _SECRET_VALUE.search(value):
        advice = "keep it in the environment (WANDB_API_KEY) or in ~/.netrc"
        raise UserError(f"{source}: '{key}' looks like a secret, and a configuration is saved and logged: {advice}")


# -------------------------------------------------------------------------------------------------------------- reading


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Every option as (dotted key, value, its metadata), in the order of declaration."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value, f.metadata


def saved(path: Path) -> dict[str, Any]:
    """The options in a run's config.yaml by their dotted keys, as they stand there: nothing that it names is imported.

    {} if there is no such file. UserError: it is not readable.
    """
    return flattened(user_error(values.typed, _read(str(path)), Any, prefix=f"{path}: ")) if path.exists() else {}


def flattened(tree: Layer, prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def flat(config: Config) -> dict[str, Any]:
    """Every option by its dotted key."""
    return {key: value for key, value, _ in leaves(config)}


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def mesh_shape(parallel: Parallel, world: int) -> tuple[int, int, int]:
    """The sizes (dp_replicate, dp_shard, sp) of the mesh over `world` ranks."""
    dp = parallel.dp_replicate * parallel.dp_shard
    each = f"dp_replicate={parallel.dp_replicate} x dp_shard={parallel.dp_shard}"
    if parallel.sp is None and world % dp:
        raise UserError(f"parallel: {each} = {dp} does not divide the {world} ranks; change the sizes or the ranks")
    sp = parallel.sp or world // dp
    if dp * sp != world:
        raise UserError(
            f"parallel: {each} x sp={sp} = {dp * sp} != world {world}; start {dp * sp} ranks "
            f"(dsp-launch --nproc-per-node {dp * sp}) or change the sizes"
        )
    return parallel.dp_replicate, parallel.dp_shard, sp
