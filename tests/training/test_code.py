"""Ranks of other code, of other files."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.runs import TINY
from zoo.training import UserError, ranks


@pytest.fixture
def checkout(tmp_path):
    """A copy of the code that ranks run."""
    shutil.copytree(ROOT / "zoo", tmp_path / "zoo", ignore=shutil.ignore_patterns("__pycache__", "configs"))
    shutil.copytree(ROOT / "dsp", tmp_path / "dsp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    return tmp_path


def test_a_rank_of_another_zoo_is_refused_at_sp_of_one_too(checkout, tmp_path):
    file = checkout / "zoo/training/optim.py"
    file.write_text(file.read_text().replace("def learning_rate(", "RATE = 1.01\n\n\ndef learning_rate("))
    (tmp_path / "tiny.yaml").write_text(TINY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    arguments = ["tiny.yaml", "parallel.dp_shard=2", "parallel.sp=1", f"runs_dir={tmp_path / 'runs'}"]
    processes = [
        subprocess.Popen(
            [sys.executable, str(root / "train.py"), *arguments], cwd=tmp_path, text=True, stderr=subprocess.PIPE,
            env=os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(root)},
        )
        for rank, root in enumerate((ROOT, checkout))
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
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
        ("train.py", "train.py"), ("dsp", "dsp/ops.py"), ("zoo", "zoo/training/tasks/video.py"),
        ("code of user", "user/data.py"),
    ]:  # fmt: skip
        (checkout / part).write_text((checkout / part).read_text() + "\n")
        after = facts()
        assert {key for key in before if before[key] != after[key]} == {name}
        before = after
    with pytest.raises(
        UserError, match=r"1 of 2 others differ from rank 0, rank 2 in torch=2 \(rank 0: 1\); give every"
    ):
        ranks.agree_on_code([{"torch": "1"}, {"torch": "1"}, {"torch": "2"}])
    assert "user" not in sys.modules
