"""Inputs that faults.py breaks: files of a run, the bytes of all that is read; and hostile files, by their memory."""

import ctypes
import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT
from benchmarks.hosts import highest
from zoo.data import video_file
from zoo.data.latent_folder import LatentFolder
from zoo.data.latent_manifest import LatentError, Manifest, write_manifest
from zoo.data.latents import Entry, Writer
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.structure import read_structure
from zoo.pictures import save_gif
from zoo.training import UserError, records, verify
from zoo.training import config as cfg

DEMO = ROOT / "configs/demo.yaml"
REFUSED = (UserError, ValueError, verify.Damaged, LatentError, video_file.VideoError)  # a reader's own errors
MOST = 2.0  # times the memory that a sound file takes
FLOOR = 2 << 20  # bytes: below it are the reader's own imports and tables
SIZE = 4 << 20  # bytes of most hostile files
SLOW = 50  # of so many mutations one is of what takes long to read
Reader = Callable[[Path], Any]
ALIGNMENT = b">q\nACDEFGHIK\n>r\nAC-EFaaGHIK\n>s\nACDEFGHI-\n"


# ---------------------------------------------------------------------------------------------------- files of a run


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def elsewhere(path: Path) -> None:
    """Move a folder, and leave a link to it."""
    moved = path.rename(path.parent.parent / f"elsewhere-{path.name}")
    path.symlink_to(moved.resolve())


IN_ITS_PLACE: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda p: None, "a pipe": os.mkfifo, "zeros without end": lambda p: p.symlink_to("/dev/zero"),
    "a folder": Path.mkdir, "a link to itself": lambda p: p.symlink_to(p),
}  # fmt: skip
BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "mutated": lambda data, chance: mutated(data, chance), "cut short": lambda data, _: data[:-7],
    "empty": lambda *_: b"", "brackets": lambda *_: b"[" * 200_000, "zeros": lambda *_: b"\0" * 4096,
}  # fmt: skip
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "removed": remove, "elsewhere": elsewhere, "with a stray file": lambda p: (p / "stray").write_text("x"),
    "a file": lambda p: (remove(p), p.write_text("a file")),
}  # fmt: skip


def damage(run: Path, chance: random.Random) -> str:
    """Damage one file of a run, nine times of ten of a checkpoint; says which and how."""
    step = run / "checkpoints" / chance.choice(["step-00000006", *7 * ["step-00000009"]])
    files = [run / name for name in ("metrics.jsonl", "config.yaml", "samples")]
    path = chance.choice(files + 6 * sorted(step.iterdir()) + 2 * [step] + [run / "checkpoints"])
    if path.is_dir():
        FOLDERS[way := chance.choice([*FOLDERS])](path)
    elif (way := chance.choice([*IN_ITS_PLACE, *3 * ["mutated", "cut short"], "empty", "brackets", "zeros"])) in BYTES:
        path.write_bytes(BYTES[way](path.read_bytes(), chance))
    else:
        remove(path)
        IN_ITS_PLACE[way](path)
    return f"{path.relative_to(run)}: {way}"


def contents(checkpoint: Path) -> dict[str, bytes | None]:
    """The bytes of every file of a checkpoint; None for an entry that is no file."""
    names = ("__0_0.distcp", ".metadata", "state.json", "manifest.json")
    return {name: (checkpoint / name).read_bytes() if _regular(checkpoint / name) else None for name in names}


def _regular(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a link to itself
        return False


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


# -------------------------------------------------------------------------------------------------------------- data


def unpacked(name: str) -> bytes:
    return gzip.decompress((ROOT / f"tests/structures/{name}.gz").read_bytes())


def latents(folder: Path) -> Path:
    """A small folder of encoded clips."""
    facts = Manifest("Tiny", "there", "1", 2, (1, 8, 8), False, 0.0, 1.0, "T5", "there", "2", 6, 5)
    write_manifest(folder, facts, torch.zeros(1, 6))
    with Writer(folder, shard_bytes=3000) as writer:
        for i in range(6):
            entry = Entry(f"{i}.mp4", f"clip {i}", 5, 32, 48, 24.0, (2, 5, 4, 6), 2)
            writer.add(entry, torch.randn(2, 5, 4, 6), torch.randn(2, 6))
    return folder


def read_latents(path: Path) -> None:
    """Read all of the folder that a file is of."""
    folder = LatentFolder(path.parent)
    folder.latents.verify()
    for clips in folder.clips:
        for entry in clips:
            folder.latent(entry)
            folder.caption(entry)


def read_video(path: Path) -> None:
    video = video_file.probe(path, verify=True)
    if isinstance(video, str):
        raise video_file.VideoError(video)
    video_file.read(video, [0, len(video.times) - 1], 8, 8)


def read_state(path: Path) -> None:
    verify.check_state(path, 3)


def read_config(path: Path) -> None:
    cfg.load([str(path)])


def sources(home: Path) -> tuple[list[tuple[str, bytes, Reader]], list[tuple[str, bytes, Reader]]]:
    """All that is read, each with its reader: what is read fast, and what takes long."""
    metrics = b"".join(json.dumps({"step": i, "loss": 1 / (i + 1)}).encode() + b"\n" for i in range(20))
    manifest = json.dumps({f"__{i}_0.distcp": {"size": 9, "sha256": "0" * 64} for i in range(4)}).encode()
    state = json.dumps({"format": 1, "step": 3, "identity": {}, "extra": {"wandb_id": None}}).encode()
    pdb = unpacked("1A8O.pdb")
    atoms = b"\n".join(pdb.splitlines()[-900:-700])
    fast: list[tuple[str, bytes, Reader]] = [
        ("metrics.jsonl", metrics, records.read_metrics), ("manifest.json", manifest, verify.read_json),
        ("state.json", state, read_state), ("some.a3m", ALIGNMENT, read_alignment),
        ("some.fasta", b">q\nACDEFGHIK\n>r\nAC-EFGHIK\n", read_alignment), ("some.pdb", atoms, read_structure),
    ]  # fmt: skip
    save_gif(home / "some.gif", torch.rand(1, 3, 6, 16, 16) * 2 - 1)
    far = re.sub(rb"(?m)^(ATOM.{26}) .{7}", rb"\1 1e30000", pdb, count=1)
    slow: list[tuple[str, bytes, Reader]] = [
        ("run.yaml", DEMO.read_bytes(), read_config), ("some.gif", (home / "some.gif").read_bytes(), read_video),
        *((name, unpacked(name), read_structure) for name in ("1A8O.cif", "1A8O.pdb", "2BEG.pdb")),
        ("short.pdb", b"SEQRES\nSEQRES  1\n" + pdb, read_structure), ("far.pdb", far, read_structure),
    ]  # fmt: skip
    shards = sorted(latents(home / "latents").iterdir())[:3]
    slow += [(f"latents/{path.name}", path.read_bytes(), read_latents) for path in shards]
    return fast, slow


def mutations(folder: Path, count: int, chance: random.Random, report: Any) -> None:
    """Bytes changed in every file that is read: the reader's own error, or a result."""
    home = folder / "mutations"
    home.mkdir(parents=True)
    fast, slow = sources(home)
    refused = 0
    for i in range(count):
        name, data, reader = slow[i // SLOW % len(slow)] if i % SLOW == 0 else fast[i % len(fast)]
        path = home / name
        path.write_bytes(changed := mutated(data, chance))
        try:
            reader(path)
        except REFUSED:
            refused += 1
        except Exception as error:
            kept = Path(f"{path.name}.broken")
            report.hold(False, f"mutation {i} of {name}: {type(error).__name__}: {str(error)[:200]} (kept as {kept})")
            kept.write_bytes(changed)
        path.write_bytes(data)
    report.add("mutations", count, refused=refused, read=count - refused)


# ------------------------------------------------------------------------------------------------------------ memory


class Case(NamedTuple):
    name: str  # of the file
    what: str
    hostile: bytes
    sound: bytes  # as large
    reader: Reader


def cases() -> Iterator[Case]:
    """One after another, as all together would take the memory that is to be measured."""
    yield from _structures()
    yield from _alignments()
    yield Case("some.mp4", "a broken time stamp", _video(24 * 100_000), _video(0), read_video)
    yield from _texts()


def _structures() -> Iterator[Case]:
    pdb, cif = unpacked("1A8O.pdb"), unpacked("1A8O.cif")
    line = b"SEQRES %3d A%5d  ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA\n"
    seqres = b"".join(line % (i % 999, 1) for i in range(SIZE // 70))
    first, *_, last = (match.start() for match in re.finditer(rb"(?m)^ATOM.*$", pdb))
    body = pdb[first:last]
    models = b"".join(b"MODEL     %4d\n%sENDMDL\n" % (i % 9999, body) for i in range(SIZE // len(body)))
    yield Case("some.pdb", "780,000 residues in SEQRES", seqres + pdb, pdb[:first] + models, read_structure)
    atoms = re.findall(rb"(?m)^ATOM .*\n", cif)
    more = b"".join(atom.rstrip()[:-1] + b"%d\n" % (i % 99 + 2) for i in range(SIZE // 9000) for atom in atoms)
    at = cif.index(atoms[-1]) + len(atoms[-1])
    sound = cif[:at] + more[:SIZE].rsplit(b"\n", 1)[0] + b"\n" + cif[at:]
    other = b"loop_\n_x.a\n_x.b\n" + b"1 2\n" * (SIZE // 4)
    yield Case("some.cif", "another table", cif + other, sound, read_structure)
    keys = b"".join(b"_x.k%d 1\n" % i for i in range(SIZE // 12))
    yield Case("some.cif", "350,000 tables of one cell", cif + keys, sound, read_structure)
    linked = b"loop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id\n"
    linked += b"".join(b"1 %d ALA\n" % i for i in range(SIZE // 14))
    yield Case("some.cif", "a chain of 300,000 residues", cif + linked, sound, read_structure)
    packed = gzip.compress(pdb[:first] + 6 * models, 1)  # of which less comes out than of the other
    bomb = gzip.compress(b"ATOM  " + b" " * (200 << 20))
    yield Case("some.pdb.gz", "200 MiB packed into 200 KiB", bomb, packed, read_structure)


def _alignments() -> Iterator[Case]:
    rows, row = SIZE // 1000, b"ACDEFGHIKL" * 100
    sound = b"".join(b">%d\n%s\n" % (i, row) for i in range(rows))
    wide = b">q\n" + b"A" * (SIZE // 2) + b"\n>r\n" + b"A" * (SIZE // 2 - 1) + b"\n"
    for what, hostile in (
        ("rows of millions of residues that differ", wide),
        ("an insertion of millions", b">q\nA\n" + b">r\nA%s\n" % (b"a" * SIZE)),
        ("700,000 rows of one residue", b">q\nA\n" * (SIZE // 6)),
    ):
        yield Case("some.a3m", what, hostile, sound, read_alignment)
    head, lines = b"# STOCKHOLM 1.0\n", b"".join(b"r%06d %s\n" % (i, row) for i in range(rows))
    repeats = head + b"q A\n" * (SIZE // 4) + b"//\n"
    yield Case("some.sto", "one row, in a million parts", repeats, head + lines + b"//\n", read_alignment)


def _video(late: int) -> bytes:
    """A second of video, its last frame so many ticks later."""
    import av
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width = stream.height = 512
        for i in range(24):
            frame = av.VideoFrame.from_ndarray(np.full((512, 512, 3), i * 9, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                if i == 23:
                    packet.pts = packet.dts = packet.pts + late
                container.mux(packet)
        container.mux(stream.encode())
    return file.getvalue()


def _texts() -> Iterator[Case]:
    record = {"step": 1, "loss": 0.25, "grad_norm": 1.5, "lr": 1e-4, "time": "2026-01-01T00:00:00"}
    sound = (json.dumps(record).encode() + b"\n") * (SIZE // 100)
    brackets = b"[" + b"{}," * (SIZE // 3) + b"{}]"
    yield Case("metrics.jsonl", "a line of a million objects", brackets, sound, records.read_metrics)
    files = {f"__{i}_0.distcp": {"size": 9, "sha256": f"{i:064d}"} for i in range(SIZE // 120)}
    manifest = json.dumps(files).encode()
    names = b"{" + b",".join(b'"%08d":%d' % (i, i) for i in range(SIZE // 19)) + b"}"
    for what, hostile in (
        ("a million objects", b'{"a":' + brackets + b"}"), ("200,000 names", names), ("without bottom", b"[" * SIZE)
    ):  # fmt: skip
        yield Case("manifest.json", what, hostile, manifest, verify.read_json)


def measured(path: Path, reader: Reader) -> tuple[int, float, str]:
    """Reading a file in a process of its own: bytes beyond what it had, seconds, and an error's words."""
    sees, tells = os.pipe()
    ctypes.CDLL(None).malloc_trim(0)  # or what is free here already would be taken first, and not be seen
    if not (pid := os.fork()):
        said = []

        def read() -> None:
            try:
                reader(path)
            except Exception as error:
                said.append(f"{'' if isinstance(error, REFUSED) else 'not its own: '}{type(error).__name__}: {error}")

        outcome = [*highest(read), "".join(said)[:200]]
        os.write(tells, json.dumps(outcome).encode())
        os._exit(0)
    os.close(tells)
    with os.fdopen(sees) as file:
        taken, seconds, error = json.loads(file.read())
    os.waitpid(pid, 0)
    return taken, seconds, error


def memory(folder: Path, count: int, _: Any, report: Any) -> None:
    """Every hostile file beside a sound one: at most twice the memory."""
    home, most, slowest, done = folder / "memory", 0.0, 0.0, 0
    home.mkdir(parents=True)
    for case in itertools.islice(cases(), count):
        path, name, done = home / case.name, f"memory {case.name}, {case.what}", done + 1
        path.write_bytes(case.sound)
        sound = measured(path, case.reader)
        path.write_bytes(case.hostile)
        taken, seconds, error = measured(path, case.reader)
        ratio = taken / max(sound[0], FLOOR)
        most, slowest = max(most, ratio), max(slowest, seconds)
        print(f"  {name}: {taken >> 20} MiB, a sound one {sound[0] >> 20} MiB: {error or 'read'}", flush=True)
        report.hold(not sound[2], f"{name}: the sound one: {sound[2]}")
        report.hold(ratio <= MOST and not error.startswith("not its own"), f"{name}: {ratio:.1f} times, {error}")
    report.add("memory", done, most_times_a_sound_one=f"{most:.2f}", slowest_s=f"{slowest:.1f}")
