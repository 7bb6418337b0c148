"""Inputs that faults.py breaks: files of a run, configurations, data files, and bytes of all of them."""

import gzip
import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zoo.data import limits, video_folder
from zoo.data.latent_folder import LatentFolder
from zoo.data.latents import Entry, LatentError, Manifest, Writer, write_manifest
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.structure import read_structure
from zoo.pictures import save_gif
from zoo.training import UserError, records, verify
from zoo.training import config as cfg
from zoo.training.model import make_plan, without_weights

STRUCTURES = Path(__file__).resolve().parents[2] / "tests" / "structures"
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
ANSWER = 20  # seconds within which a configuration has to be judged


def damage(run: Path, chance: random.Random) -> str:
    """Damage one file of a run, nine times of ten of a checkpoint; says which and how."""
    names = ["metrics.jsonl", "config.yaml", "samples"]
    step = run / "checkpoints" / chance.choice(["step-00000006", *7 * ["step-00000009"]])
    files = [run / name for name in names] + 6 * sorted(step.iterdir()) + 2 * [step] + [run / "checkpoints"]
    path = chance.choice(files)
    ways: list[Callable[[Path], Any]] = [_remove, _fifo, _zero, _folder, _loop]
    if path.is_file():
        ways += 3 * [lambda p: _write(p, mutated(p.read_bytes(), chance)), lambda p: _write(p, p.read_bytes()[:-7])]
        ways += [lambda p: _write(p, b""), lambda p: _write(p, b"[" * 200_000), lambda p: _write(p, b"\0" * 4096)]
    else:
        ways = [_remove, lambda p: _moved(p), lambda p: (p / "stray").write_text("x"), _file]
    way = chance.randrange(len(ways))
    ways[way](path)
    return f"{path.relative_to(run)}, way {way}"


def contents(checkpoint: Path) -> dict[str, bytes | None]:
    """The bytes of every file of a checkpoint; None for an entry that is no file."""
    names = ("__0_0.distcp", ".metadata", "state.json", "manifest.json")
    return {name: (checkpoint / name).read_bytes() if _regular(checkpoint / name) else None for name in names}


def _regular(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a link to itself
        return False


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink()


def _fifo(path: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def _zero(path: Path) -> None:
    _remove(path)
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _file(path: Path) -> None:
    _remove(path)
    path.write_text("a file")


def _loop(path: Path) -> None:
    _remove(path)
    path.symlink_to(path)


def _moved(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere.resolve())


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one to four of them changed, cut out, repeated or put in."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, width = chance.randrange(len(out) + 1), chance.choice([1, 1, 4, 30, 400])
        way = chance.randrange(4)
        if way == 0 and at < len(out):
            out[at] = chance.randrange(256)
        elif way == 1:
            del out[at : at + width]
        elif way == 2:
            out[at:at] = out[at : at + width]
        else:
            out[at:at] = chance.choice([chance.randbytes(width), b"9" * width, b"nan ", b"-", b"\0", b"1e999 "])
    return bytes(out)


# ------------------------------------------------------------------------------------------------------ configurations


def wrong() -> Iterator[str]:
    """Arguments that no run can have."""
    counts = "train.steps train.batch train.accumulation eval.clips eval.levels sample.clips sample.steps"
    sizes = "log.every data.frames data.height data.width parallel.sp parallel.dp_shard checkpoint.keep hardware.node"
    for key in f"{counts} {sizes}".split():
        for value in ("0", "-1", "1.5", ".nan", "9" * 30, "many", "null" if key != "parallel.sp" else "x", "[1]"):
            yield f"{key}={value}"
    rates = "optim.lr optim.eps optim.weight_decay optim.final train.clip train.ema train.timeout sample.guidance"
    for key in rates.split():
        for value in (".nan", ".inf", "-.inf", "-1", "1e400", "much"):
            yield f"{key}={value}"
    for key in ("hidden", "depth", "heads", "in_channels", "patch"):
        for value in ("0", "-1", ".nan", "9" * 30, "{}", "[1]", "1000000000"):
            yield f"model.overrides.{key}={value}"
    for name in ("..", ".", "a/b", "a\x1b[2Jb", "a\0b", "x" * 300, "${name}", "${train.steps}${train.steps}", "/"):
        yield f"name={name}"
    yield from ("train.steps=" + "[" * 4000, "train.steps=" + "{a: " * 900, "model.overrides=&a [*a]", "runs_dir=\0")
    yield from ("model.name=\x1b[31m", "data.name=x", "train=1", "train.steps.x=1", "optim.betas=[1,2]", "stray=1")
    yield from ("parallel.save_exchanges=true", "data.speed=[2,1]", "data.speed=[.nan,1]", "data.frames=1000000")
    yield from ("train.seed=-1", "train.seed=" + "9" * 19, "=1", "a b=1", "train.precision=fp8", "parallel.method=none")


def configs(_: Path, count: int, __: Any, report: Any) -> None:
    told = 0
    cases = list(wrong())[:count]

    def late(*_: Any) -> None:
        raise TimeoutError

    before, slowest = signal.signal(signal.SIGALRM, late), 0.0
    for argument in cases:
        began = time.monotonic()
        signal.alarm(ANSWER)
        try:
            config = cfg.load([str(DEMO), argument])
            task = cfg.create_task(config)
            _, objective, _ = without_weights(config, task)
            plan = make_plan(config, task, objective, 1)
            if plan.peak > 2**40:  # what a run is refused for, by the memory of its host
                raise UserError("too much memory")
            report.hold(False, f"config {argument[:50]!r}: accepted")
        except UserError as error:
            line = str(error)
            told += report.hold(line.isprintable() and len(line) < 1000, f"config {argument[:50]!r}: {line[:200]!r}")
        except Exception as error:
            report.hold(False, f"config {argument[:50]!r}: {type(error).__name__}: {error}")
        finally:
            signal.alarm(0)
        slowest = max(slowest, time.monotonic() - began)
    signal.signal(signal.SIGALRM, before)
    report.add("configs", len(cases), told_in_one_line=told, slowest_s=f"{slowest:.1f}")


# -------------------------------------------------------------------------------------------------------------- data


def latents(folder: Path) -> Path:
    """A small folder of encoded clips."""
    facts = Manifest("Tiny", "there", "1", 2, (1, 8, 8), False, 0.0, 1.0, "T5", "there", "2", 6, 5)
    write_manifest(folder, facts, torch.zeros(1, 6))
    with Writer(folder, shard_bytes=3000) as writer:
        for i in range(6):
            entry = Entry(f"{i}.mp4", f"clip {i}", 5, 32, 48, 24.0, (2, 5, 4, 6), 2)
            writer.add(entry, torch.randn(2, 5, 4, 6), torch.randn(2, 6))
    return folder


def read_latents(folder: Path) -> None:
    found = LatentFolder(folder)
    found.latents.verify()
    for clips in found.clips:
        for entry in clips:
            found.latent(entry)
            found.caption(entry)


def read_video(path: Path) -> None:
    found = video_folder.probe(path, verify=True)
    if isinstance(found, str):
        raise video_folder.VideoError(found)
    video_folder.read(found, [0, len(found.times) - 1], 8, 8)


def unpacked(name: str) -> bytes:
    return gzip.decompress((STRUCTURES / f"{name}.gz").read_bytes())


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files whose work is far larger than they are, and that break a record's form."""
    pdb = unpacked("1A8O.pdb")
    line = b"SEQRES %3d A%5d  ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA\n"
    yield "residues.pdb", b"".join(line % (i % 999, 1) for i in range(77_000)) + pdb
    yield "short.pdb", b"SEQRES\nSEQRES  1\n" + pdb
    yield "far.pdb", re.sub(rb"(?m)^(ATOM.{26}) .{7}", rb"\1 1e30000", pdb, count=1)
    yield "rows.cif", unpacked("1A8O.cif") + b"loop_\n_x.a\n_x.b\n" + b"1 2\n" * 500_000
    yield "bomb.pdb.gz", gzip.compress(b"ATOM  " + b" " * (200 << 20))
    yield "wide.a3m", b">q\n" + b"A" * 3_000_000 + b"\n>r\n" + b"A" * 2_999_999 + b"\n"
    yield "deep.sto", b"# STOCKHOLM 1.0\n" + b"q A\n" * 200_000


def files(folder: Path, count: int, chance: random.Random, report: Any) -> None:
    """Every reader on damaged files: its own error, or a result, and no memory out of proportion."""
    home = folder / "files"
    home.mkdir(parents=True)
    save_gif(home / "sound.gif", torch.rand(1, 3, 6, 16, 16) * 2 - 1)
    shards = latents(home / "latents")
    sources = [(name, unpacked(name)) for name in ("1A8O.cif", "1A8O.pdb", "2BEG.pdb")] + [
        ("sound.gif", (home / "sound.gif").read_bytes()),
        ("some.a3m", b">q\nACDEFGHIK\n>r\nAC-EFaaGHIK\n>s\nACDEFGHI-\n"),
        *((path.name, path.read_bytes()) for path in sorted(shards.iterdir())[:3]),
    ]
    cases = [*hostile()]
    while len(cases) < count:
        cases += [(name, mutated(data, chance)) for name, data in sources]
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, data in cases[:count]:
        refused += read(home, name, data, report)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    largest = max((len(data) for _, data in cases[:count]), default=0) / 2**20
    report.add("files", min(count, len(cases)), refused=refused, largest_MiB=f"{largest:.0f}", grown_MiB=f"{grown:.0f}")


def read(home: Path, name: str, data: bytes, report: Any) -> bool:
    """Read one file; whether it was refused."""
    if name.endswith((".safetensors", ".json")):
        path = home / "latents" / name
        sound = path.read_bytes()
    else:
        path, sound = home / f"case-{name}", b""
    path.write_bytes(data)
    reader: Callable[[Path], Any] = read_structure
    if sound:
        reader = lambda path: read_latents(path.parent)  # noqa: E731
    elif ".gif" in name:
        reader = read_video
    elif ".a3m" in name or ".sto" in name:
        reader = read_alignment
    try:
        reader(path)
        return False
    except (LatentError, video_folder.VideoError, ValueError):
        return True
    except Exception as error:
        return report.hold(False, f"{name}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        if sound:
            path.write_bytes(sound)
        else:
            path.unlink()


def mutations(folder: Path, count: int, chance: random.Random, report: Any) -> None:
    """Bytes changed in every text that is read: the reader's own error, or a result."""
    home = folder / "mutations"
    home.mkdir(parents=True)
    atoms = b"\n".join(unpacked("1A8O.pdb").splitlines()[-900:-700])
    metrics = b"".join(json.dumps({"step": i, "loss": 1 / (i + 1)}).encode() + b"\n" for i in range(20))
    manifest = json.dumps({f"__{i}_0.distcp": {"size": 9, "sha256": "0" * 64} for i in range(4)}).encode()
    state = json.dumps({"format": 1, "step": 3, "identity": {}, "extra": {"wandb_id": None}}).encode()

    def check_state(path: Path) -> None:
        verify.check_state(path, verify.read_json(path), 3)

    readers: list[tuple[str, bytes, Callable[[Path], Any]]] = [
        ("metrics.jsonl", metrics, records.read_metrics),
        ("manifest.json", manifest, verify.read_json),
        ("state.json", state, check_state),
        ("some.a3m", b">q\nACDEFGHIK\n>r\nAC-EFaaGHIK\n>s\nACDEFGHI-\n", read_alignment),
        ("some.fasta", b">q\nACDEFGHIK\n>r\nAC-EFGHIK\n", read_alignment),
        ("some.pdb", atoms, read_structure),
        ("some.json", state, lambda path: limits.read_json(path, 1 << 20)),
    ]
    slow = [("run.yaml", DEMO.read_bytes(), lambda path: cfg.load([str(path)]))]
    refused = 0
    for i in range(count):
        name, data, reader = slow[0] if i % 50 == 0 else readers[i % len(readers)]
        path = home / name
        path.write_bytes(mutated(data, chance))
        try:
            reader(path)
        except (UserError, ValueError, verify.Damaged):
            refused += 1
        except Exception as error:
            kept = Path(f"{name}.broken")
            report.hold(False, f"mutation {i} of {name}: {type(error).__name__}: {str(error)[:200]} (kept as {kept})")
            kept.write_bytes(path.read_bytes())
    report.add("mutations", count, refused=refused, read=count - refused)
