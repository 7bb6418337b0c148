"""Ranks of other code, of other files."""

import contextlib
import importlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.clips import gif
from tests.support.latent_folders import latent_folder
from tests.support.paths import ROOT
from tests.support.runs import TINY
from zoo.data.file_records import BLOCK, BLOCKS, FileRecords
from zoo.data.latent_folder import LatentFolder
from zoo.data.latent_manifest import UNCONDITIONAL
from zoo.data.protein.folder import ProteinFolder, read_protein
from zoo.data.video_folder import VideoFolder
from zoo.training import UserError, ranks


@pytest.fixture
def checkout(tmp_path):
    """A copy of the code that ranks run."""
    shutil.copytree(ROOT / "zoo", tmp_path / "zoo", ignore=shutil.ignore_patterns("__pycache__", "configs"))
    shutil.copytree(ROOT / "dsp", tmp_path / "dsp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    return tmp_path


def two_ranks(file, roots, *overrides):
    """The errors of two ranks, each started from the code that `roots` names for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(root / "train.py"), str(file), *overrides],
            cwd=file.parent, text=True, stderr=subprocess.PIPE,
            env=os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(root)},
        )
        for rank, root in enumerate(roots)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    return errors


def test_a_rank_of_another_zoo_is_refused_at_sp_of_one_too(checkout, tmp_path):
    file = checkout / "zoo/training/optim.py"
    file.write_text(file.read_text().replace("def learning_rate(", "RATE = 1.01\n\n\ndef learning_rate("))
    (tmp_path / "tiny.yaml").write_text(TINY)
    mesh = ["parallel.dp_shard=2", "parallel.sp=1", f"runs_dir={tmp_path / 'runs'}"]
    errors = two_ranks(tmp_path / "tiny.yaml", [ROOT, checkout], *mesh)
    assert errors[0].startswith("error: the ranks run different code: 1 of 1 others differ from rank 0, rank 1 in zoo=")
    assert not (tmp_path / "runs").exists()


def test_the_digest_is_of_all_code_and_of_what_a_configuration_names(checkout, monkeypatch):
    monkeypatch.setattr(ranks, "HOME", checkout)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(checkout / "train.py"), raising=False)
    (checkout / "user").mkdir()
    (checkout / "user/data.py").write_text("x = 1\n")
    monkeypatch.chdir(checkout)
    config = {"data.name": "user.data:Set", "model.name": "wan", "task": None}

    def facts():
        return ranks.code() | ranks.named_code(config)

    before = facts()
    assert before.keys() == {"torch", "dsp", "zoo", "train.py", "code of user"}
    for name, part in [
        ("train.py", "train.py"), ("dsp", "dsp/comm/ops.py"), ("zoo", "zoo/training/tasks/video.py"),
        ("code of user", "user/data.py"),
    ]:  # fmt: skip
        (checkout / part).write_text((checkout / part).read_text() + "\n")
        after = facts()
        assert {key for key in before if before[key] != after[key]} == {name}
        before = after
    with pytest.raises(
        UserError, match=r"1 of 2 others differ from rank 0, rank 2 in torch=2 \(rank 0: 1\); give every"
    ):
        ranks.check_same_code([{"torch": "1"}, {"torch": "1"}, {"torch": "2"}])
    assert "user" not in sys.modules


def refused_in(mesh, folders, arguments):
    """The error that this rank writes of a run that does not begin, in a folder of its own."""
    sys.path.insert(0, str(ROOT))
    trainer = importlib.import_module("train")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as written:
        patch.chdir(folders[dist.get_rank()])
        assert trainer.main(arguments) == 2
    return written.getvalue()


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="a path that names another folder for each process")
def test_ranks_that_read_other_files_of_the_same_names_are_refused(tmp_path, whole_world):
    for i in (0, 1):
        for name, height in (("a", 8), ("b", 8 + 4 * i), ("c", 8)):
            gif(tmp_path / f"host{i}/videos/{name}.gif", 6, height, 8)
    (tmp_path / "tiny.yaml").write_text(re.sub("data: .*", "", TINY))
    data = "data={name: video_folder, path: /proc/self/cwd/videos, frames: 5, height: 8, width: 8}"
    folders = [tmp_path / f"host{i}" for i in (0, 1)]
    more = "model.overrides={in_channels: 3, num_classes: null}", "sample.guidance=1"
    arguments = [str(tmp_path / "tiny.yaml"), data, *more, f"runs_dir={tmp_path / 'runs'}"]
    errors = whole_world(refused_in, 2, folders, arguments)
    said = r"error: the ranks read different files of the same names: on rank 1 \(.*\) /proc/self/cwd/videos/b.gif has "
    assert re.match(said + r"[\d,]+ bytes with hash \w+, on rank 0 \(.*\) [\d,]+ bytes with hash \w+; copy", errors[0])
    assert not (tmp_path / "runs").exists()


LARGE = 3 * BLOCK * BLOCKS + 17


def compare_on(mesh, root, names):
    """The error of a rank whose files of these names are in a folder of its own."""
    here = os.getcwd()
    os.chdir(root / f"host{dist.get_rank()}")
    try:
        ranks.check_same_files([FileRecords(map(Path, names[:2])), FileRecords(map(Path, names[2:]))])
    except UserError as error:
        return str(error)
    finally:
        os.chdir(here)
    return ""


def test_files_of_ranks_are_compared_by_size_and_content(whole_world, tmp_path):
    """A large file, which is read in parts, is found if a copy of it has not been filled to its end."""
    for host in (0, 1):
        folder = tmp_path / f"host{host}"
        folder.mkdir()
        for name in ("same", "empty", "byte", "size", "large"):
            (folder / name).write_bytes(b"" if name == "empty" else b"x" * (LARGE if name == "large" else 100))
    other = tmp_path / "host1"
    (other / "byte").write_bytes(b"x" * 99 + b"y")
    (other / "size").write_bytes(b"x" * 101)
    (other / "large").write_bytes(b"x" * (LARGE * 2 // 3) + b"\0" * (LARGE - LARGE * 2 // 3))
    (tmp_path / "host0/gone").touch()
    assert whole_world(compare_on, 2, tmp_path, ["same", "empty", "same"]) == ["", ""]
    for name in ("byte", "size", "large", "gone"):
        errors = whole_world(compare_on, 2, tmp_path, ["same", "empty", name])
        assert f"on rank 1 ({socket.gethostname()}) {name} has " in errors[0]
        assert errors[0] == errors[1]
    assert " and 2 more; copy" in whole_world(compare_on, 2, tmp_path, ["same", "byte", "size", "large"])[0]


def video(folder):
    gif(folder / "a.gif", 6, 8, 8)
    data = VideoFolder(folder, frames=5, height=8, width=8)
    return data, folder / "a.gif", lambda: data.clip(0, 0)


def latents(folder):
    data = LatentFolder(latent_folder(folder))
    entry = data.clips[0][0]
    return data, folder / entry.shard, lambda: data.latent(entry, range(1))


def caption(folder):
    data = LatentFolder(latent_folder(folder))
    return data, folder / UNCONDITIONAL, data.latents.unconditional


def alignment(folder):
    folder.mkdir()
    shutil.copy(ROOT / "tests/structures/1A8O.cif.gz", folder)
    sequence = read_protein(folder / "1A8O.cif.gz", ()).sequence
    (folder / "1A8O.a3m").write_text(f">1\n{sequence}\n")
    data = ProteinFolder(folder)
    data._read.clear()
    return data, folder / "1A8O.a3m", lambda: data._read.clear() or data.protein(0)


@pytest.mark.parametrize("kind", [video, latents, caption, alignment])
def test_a_file_that_changes_during_a_run_is_named(tmp_path, kind):
    data, path, read = kind(tmp_path / "data")
    assert path in data.files.paths
    data.files.take()
    read()
    os.utime(path, (0, 0))  # touched, and the same
    read()
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=f"{path.name} has changed since the run began: it had [0-9,]+ bytes"):
        read()
