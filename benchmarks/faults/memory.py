"""How much memory a hostile file takes to read, beside a sound one of the same kind that is as large."""

import ctypes
import gzip
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.inputs import DEMO, read_video, unpacked
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.structure import read_structure
from zoo.training import config as cfg
from zoo.training import records, verify

MOST = 2.0  # times what the sound one takes
FLOOR = 2 << 20  # bytes: below it are the reader's own imports and tables
SIZE = 4 << 20  # bytes of most files
KINDS = 15
Reader = Callable[[Path], Any]


class Case(NamedTuple):
    name: str  # of the file
    what: str
    hostile: bytes
    sound: bytes
    reader: Reader


def cases() -> Iterator[Case]:
    """One after another, as all together would take the memory that is to be measured."""
    yield from _structures()
    yield from _alignments()
    yield from _videos()
    yield from _texts()


def _structures() -> Iterator[Case]:
    pdb, cif = unpacked("1A8O.pdb"), unpacked("1A8O.cif")
    line = b"SEQRES %3d A%5d  ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA ALA\n"
    seqres = b"".join(line % (i % 999, 1) for i in range(SIZE // 70))
    first, *_, last = (found.start() for found in re.finditer(rb"(?m)^ATOM.*$", pdb))
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
    yield Case("some.cif", "a chain of 300,000 residues", linked.join([cif, b""]), sound, read_structure)
    packed = gzip.compress(pdb[:first] + 6 * models, 1)  # of which less comes out than of the other
    bomb = gzip.compress(b"ATOM  " + b" " * (200 << 20))
    yield Case("some.pdb.gz", "200 MiB packed into 200 KiB", bomb, packed, read_structure)


def _alignments() -> Iterator[Case]:
    rows = SIZE // 1000
    sound = b"".join(b">%d\n%s\n" % (i, b"ACDEFGHIKL" * 100) for i in range(rows))
    wide = b">q\n" + b"A" * (SIZE // 2) + b"\n>r\n" + b"A" * (SIZE // 2 - 1) + b"\n"
    yield Case("some.a3m", "rows of millions of residues that differ", wide, sound, read_alignment)
    inserted = b">q\nA\n" + b">r\nA%s\n" % (b"a" * SIZE)
    yield Case("some.a3m", "an insertion of millions", inserted, sound, read_alignment)
    narrow = b">q\nA\n" * (SIZE // 6)
    yield Case("some.a3m", "700,000 rows of one residue", narrow, sound, read_alignment)
    lines = b"".join(b"r%06d %s\n" % (i, b"ACDEFGHIKL" * 100) for i in range(rows))
    again = b"# STOCKHOLM 1.0\n" + b"q A\n" * (SIZE // 4) + b"//\n"
    yield Case("some.sto", "one row, in a million parts", again, b"# STOCKHOLM 1.0\n" + lines + b"//\n", read_alignment)


def _videos() -> Iterator[Case]:
    yield Case("some.mp4", "a broken time stamp", _video(24 * 100_000), _video(0), read_video)


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
    yield Case("manifest.json", "a million objects", b'{"a":' + brackets + b"}", manifest, verify.read_json)
    names = b"{" + b",".join(b'"%08d":%d' % (i, i) for i in range(SIZE // 19)) + b"}"
    yield Case("manifest.json", "200,000 names", names, manifest, verify.read_json)
    yield Case("manifest.json", "without bottom", b"[" * SIZE, manifest, verify.read_json)
    demo = DEMO.read_bytes()
    bomb = b"a0: &a0 [x]\n"
    bomb += b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9))
    yield Case("run.yaml", "aliases of aliases", bomb, demo, lambda path: cfg.load([str(path)]))


class Read(NamedTuple):
    taken: int  # bytes
    seconds: float
    error: str  # '' for none


def measured(path: Path, reader: Reader) -> Read:
    """Reading a file in a process of its own: what it took at most beyond what it had, and how it ended."""
    sees, tells = os.pipe()
    ctypes.CDLL(None).malloc_trim(0)  # or what is free here already would be taken first, and not be seen
    if not (pid := os.fork()):
        before, began, error = _kilobytes("VmRSS"), time.monotonic(), ""
        try:
            reader(path)
        except Exception as raised:  # whether it is the right one, the other kinds of faults ask
            error = f"{type(raised).__name__}: {raised}"[:200]
        found = [(_kilobytes("VmHWM") - before) << 10, time.monotonic() - began, error]
        os.write(tells, json.dumps(found).encode())
        os._exit(0)
    os.close(tells)
    with os.fdopen(sees) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return Read(*json.loads(told))


def _kilobytes(what: str) -> int:
    return int(re.search(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def memory(folder: Path, count: int, _: Any, report: Any) -> None:
    """Every hostile file beside a sound one: at most twice the memory."""
    home, most, slowest = folder / "memory", 0.0, 0.0
    home.mkdir(parents=True)
    for case in itertools.islice(cases(), count):
        path, name = home / case.name, f"{case.name}, {case.what}"
        path.write_bytes(case.sound)
        sound = measured(path, case.reader)
        path.write_bytes(case.hostile)
        hostile = measured(path, case.reader)
        ratio = hostile.taken / max(sound.taken, FLOOR)
        most, slowest = max(most, ratio), max(slowest, hostile.seconds)
        took = [f"{read.taken >> 20} MiB in {read.seconds:.1f} s" for read in (hostile, sound)]
        print(f"  {name}: {len(case.hostile) / 2**20:.1f} MiB take {took[0]}, a sound one {took[1]}", flush=True)
        print(f"    {hostile.error or 'read'}", flush=True)
        report.hold(not sound.error, f"memory {name}: the sound one: {sound.error}")
        report.hold(ratio <= MOST, f"memory {name}: {ratio:.1f} times that of a sound one")
    report.add("memory", min(count, KINDS), most_times_a_sound_one=f"{most:.2f}", slowest_s=f"{slowest:.1f}")
