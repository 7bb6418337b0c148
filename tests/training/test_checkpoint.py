"""Checkpoints: exact, resharded, checked, refused."""

import enum
import io
import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.slow import slow
from zoo.training import UserError, checkpoint, verify
from zoo.training.checkpoint import Contents
from zoo.training.verify import Damaged, read_metadata

IDENTITY = {"name": "toy", "config": {"hidden": 7, "patch": [1, 2]}}


def toy(hidden=7, *, seed=0, mesh=None):
    """A small sharded model with its optimizer, and a parameter that never gets a gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, seed):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(group, tmp_path):
    """A directory with checkpoints of steps 1 and 2, and the model at both steps."""
    model, optimizer = toy()
    at = {}
    for i in (1, 2):
        step(model, optimizer, i)
        checkpoint.save(tmp_path, i, Contents(model, optimizer, identity=IDENTITY), extra={"wandb_id": f"run{i}"})
        at[i] = {name: value.clone() for name, value in values(model).items()}
    return tmp_path, at


def test_round_trip_continues_bit_for_bit(group, tmp_path):
    model, optimizer = toy()
    step(model, optimizer, 1)
    path = checkpoint.save(tmp_path, 1, Contents(model, optimizer, identity=IDENTITY), extra={"wandb_id": "abc"})
    assert path.name == "step-00000001"
    step(model, optimizer, 2)

    other, its_optimizer = toy(seed=1)
    assert not same(values(other), values(model))
    state = checkpoint.load(tmp_path, Contents(other, its_optimizer, identity=IDENTITY))
    assert state["step"] == 1
    assert state["extra"] == {"wandb_id": "abc"}
    step(other, its_optimizer, 2)
    assert same(values(other), values(model))
    weights_only, _ = toy(seed=2)
    checkpoint.load(tmp_path, Contents(weights_only, identity=IDENTITY))
    assert not same(values(weights_only), values(model))


def _reshard(mesh, directory):
    """On every rank: restore what one process saved, take the step it took, save that."""
    model, optimizer = toy(seed=3, mesh=mesh)
    checkpoint.load(Path(directory), Contents(model, optimizer, identity=IDENTITY))
    step(model, optimizer, 2)
    checkpoint.save(Path(directory), 2, Contents(model, optimizer, identity=IDENTITY))
    return values(model)


def test_another_number_of_ranks(group, tmp_path, ranks):
    """1 -> 4 -> 1 ranks, with sizes that 4 does not divide."""
    model, optimizer = toy()
    step(model, optimizer, 1)
    checkpoint.save(tmp_path, 1, Contents(model, optimizer, identity=IDENTITY))
    step(model, optimizer, 2)
    for held in ranks(_reshard, 4, str(tmp_path)):
        for name, value in values(model).items():
            torch.testing.assert_close(held[name], value, rtol=1e-6, atol=1e-6)
    back, its_optimizer = toy(seed=4)
    assert checkpoint.load(tmp_path, Contents(back, its_optimizer, identity=IDENTITY))["step"] == 2
    assert same(values(back), held)
    assert sum(path.suffix == ".distcp" for path in (tmp_path / "step-00000002").iterdir()) == 4


def test_rows_that_ranks_hold_in_another_order_are_stored_in_the_models_own(group, tmp_path):
    model, optimizer = toy()
    step(model, optimizer, 1)
    order = torch.tensor([3, 1, 0, 2, 6, 4, 5])  # row i of this run's is row order[i] of the model's own
    orders = {"0.weight": order}
    checkpoint.save(tmp_path, 1, Contents(model, optimizer, identity=IDENTITY, orders=orders))
    for given, index in (({}, order.argsort()), (orders, slice(None))):
        other, its_optimizer = toy(seed=1)
        checkpoint.load(tmp_path, Contents(other, its_optimizer, identity=IDENTITY, orders=given))
        assert torch.equal(values(other)["0.weight"], values(model)["0.weight"][index])


def test_files_of_a_checkpoint(run):
    directory, _ = run
    path = directory / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest) == sorted(p.name for p in path.iterdir() if p.name != "manifest.json")
    for name, entry in manifest.items():
        assert entry["size"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64
    metadata = verify.read_metadata(path / ".metadata", set(manifest))
    assert "optimizer.0.weight.exp_avg" in metadata.state_dict_metadata
    assert not list(directory.glob("*.incomplete"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def falls_back(run):
    """The one line that is said where step 1 is taken because step 2 is damaged; whose place the next one takes."""
    directory, at = run
    model, optimizer = toy(seed=5)
    said = []
    state = checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY), report=said.append)
    assert state["step"] == 1
    assert same(values(model), at[1])
    checkpoint.save(directory, 2, Contents(model, optimizer, identity=IDENTITY))
    assert checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY))["step"] == 2
    (line,) = said
    return line


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flip", "cut", "missing"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
def test_damage_falls_back_and_names_the_file(run, damage, name):
    damage(run[0] / "step-00000002" / name)
    said = falls_back(run)
    assert "step-00000002 is damaged" in said
    assert name in said or name == "manifest.json"


def test_nothing_sound_and_nothing_at_all(run):
    directory, _ = run
    model, optimizer = toy()
    for i in (1, 2):
        flip(directory / f"step-0000000{i}" / "__0_0.distcp")
    with pytest.raises(UserError, match=r"no sound checkpoint is left: .*step-00000002.*step-00000001.*__0_0.distcp"):
        checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY), report=lambda _: None)
    assert checkpoint.load(directory / "elsewhere", Contents(model, optimizer, identity=IDENTITY)) is None


def test_another_model_is_refused(run):
    directory, _ = run
    model, optimizer = toy(hidden=9)
    config = {"hidden": 9, "patch": [1, 2]}
    before = values(model)
    with pytest.raises(UserError) as error:
        checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY | {"config": config}))
    text = str(error.value)
    assert "checkpoint of another model" in text
    assert "config.hidden: 7 in the checkpoint, 9 here" in text
    assert "model.0.weight: (7, 5) in the checkpoint, (9, 5) here" in text
    assert same(values(model), before)

    deeper = nn.Sequential(*toy()[0], nn.Linear(3, 3))
    with pytest.raises(UserError) as error:
        checkpoint.load(directory, Contents(deeper, identity=IDENTITY))
    assert "model.unused: (3,) in the checkpoint, absent here" in str(error.value)
    assert "model.3.bias: absent in the checkpoint, (3,) here" in str(error.value)


def _state(**changes):
    """Another state.json, and a manifest that agrees with it; `extra__guard`: a part of a part."""

    def damage(path):
        state = json.loads((path / "state.json").read_text())
        for name, value in changes.items():
            *parents, key = name.split("__")
            table = state
            for parent in parents:
                table = table.setdefault(parent, {})
            table[key] = value
        (path / "state.json").write_text(json.dumps(state))
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["state.json"] = verify.digest(path / "state.json")
        (path / "manifest.json").write_text(json.dumps(manifest))

    return damage


def _manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


def _in_place(name, make):
    def damage(path):
        (path / name).unlink()
        make(path / name)

    return damage


FORGED = [
    (_in_place("manifest.json", lambda p: p.symlink_to("/dev/zero")), "manifest.json is not a regular file"),
    (_in_place("manifest.json", os.mkfifo), "manifest.json is not a regular file"),
    (_in_place("manifest.json", Path.mkdir), "manifest.json is not a regular file"),
    (_in_place("manifest.json", lambda p: p.symlink_to(p)), "manifest.json"),
    (_in_place("__0_0.distcp", os.mkfifo), "__0_0.distcp is missing"),
    (_in_place(".metadata", lambda p: p.symlink_to("/dev/zero")), ".metadata is missing"),
    (_manifest("[" * 200_000), "too many names"),
    (_manifest('{"a":' * 200_000), "too many names"),
    (_manifest('{"\\u0000": {"size": 1}}'), "is missing"),
    (_manifest(json.dumps({"x" * 5000: {"size": 1}})), "File name too long"),
    (_manifest('{"state.json": 7}'), "state.json"),
    (_manifest('{"../state.json": {"size": 1, "sha256": ""}}'), "is missing"),
    (_manifest('{"a": ' + "9" * 5000 + "}"), "manifest.json"),
    (_state(step=7), "has step '7', where 2 is expected"),
    (_state(format="x\x1b"), "has format 'x\\x1b', where 1 is expected"),
    (_state(extra=None), "has extra 'None', which is of another type"),
    (_state(extra__records=3), "has extra.records '3', which is"),
    (_state(extra__records={"count": "many"}), "has extra.records.count 'many', which is"),
    (_state(extra__guard=[]), "has extra.guard '[]', which is"),
    (_state(extra__guard={"norms": [None]}), "has extra.guard.norms '[None]', which is"),
    (_state(extra__guard={"sound": 1.5}), "has extra.guard.sound '1.5', which is"),
    (_state(identity=[1]), "has identity '[1]', which is"),
    (_state(identity__config="x"), "has identity.config 'x', which is"),
]


@pytest.mark.parametrize(
    ("damage", "said"), [slow(*case) if i % 5 else case for i, case in enumerate(FORGED)], ids=range(len(FORGED))
)
def test_a_forged_manifest_or_state_is_refused_at_once(run, damage, said):
    damage(run[0] / "step-00000002")
    line = falls_back(run)
    assert said in line
    assert len(line) < 6000


def test_moved_and_linked_back_and_things_in_the_way(run):
    """A checkpoint that lies elsewhere is one; what it leads to is never deleted, and a file in the way is."""
    directory, at = run
    elsewhere = directory.parent / "elsewhere"
    (directory / "step-00000001").rename(elsewhere)
    (directory / "step-00000001").symlink_to(elsewhere)
    model, optimizer = toy(seed=5)
    assert checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY), step=1)["step"] == 1
    assert same(values(model), at[1])
    (directory / "step-00000003.incomplete").write_text("a file")
    (directory / "step-00000009.incomplete").symlink_to(elsewhere)
    (directory / "step-00000003").write_text("a file")
    checkpoint.save(directory, 3, Contents(model, optimizer, identity=IDENTITY), keep=2)
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000002", "step-00000003"]
    assert (elsewhere / "manifest.json").is_file()


class Killed(BaseException):
    """As a SIGKILL: nobody tidies up after it."""


def test_a_kill_while_old_ones_are_removed_leaves_whole_ones(run, monkeypatch):
    """Wherever within a removal: each checkpoint that is there is whole, and the next save removes the rest."""
    directory, _ = run
    model, optimizer = toy(seed=5)
    files = sum(1 for _ in (directory / "step-00000001").iterdir())
    for within in range(files):
        copy = directory.parent / f"killed-{within}"
        shutil.copytree(directory, copy)
        unlinked, unlink = [], os.unlink

        def killed(*args, within=within, unlinked=unlinked, unlink=unlink, **kwargs):
            if len(unlinked) == within:
                raise Killed
            unlinked.append(args)
            unlink(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "unlink", killed)
            checkpoint._remove(copy / "step-00000001")
        for _, path in checkpoint.finished(copy):
            assert (path / "manifest.json").is_file()
        checkpoint.save(copy, 3, Contents(model, optimizer, identity=IDENTITY), keep=2)
        assert sorted(p.name for p in copy.iterdir()) == ["step-00000002", "step-00000003"]


class Exploit:
    def __reduce__(self):
        return os.system, ("echo owned > owned.txt",)


class Reach:
    """Whatever hangs on a class that a checkpoint may name."""

    def __reduce__(self):
        return getattr, (Metadata, "__init__")


class Early(pickle.Pickler):
    """Python 3.11 before 3.11.4, which pickles a member of an enumeration as its getattr."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def forge(path, payload):
    """Replace `.metadata` and make the manifest agree, as somebody who hands out a bad checkpoint would."""
    (path / ".metadata").write_bytes(pickle.dumps(payload))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[".metadata"] = verify.digest(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_crafted_pickle_runs_nothing(run, monkeypatch):
    directory, _ = run
    monkeypatch.chdir(directory)
    model, optimizer = toy()
    genuine = pickle.loads((directory / "step-00000002" / ".metadata").read_bytes())
    escaping = pickle.loads(pickle.dumps(genuine))
    for info in escaping.storage_data.values():
        info.relative_path = "../../secret"
    for payload, reason in [
        (Exploit(), "system"),
        ({"state_dict_metadata": Exploit()}, "system"),
        ({"state_dict_metadata": Reach()}, "builtins.getattr"),
        ("text", "holds no checkpoint metadata"),
        (escaping, "secret"),
    ]:
        forge(directory / "step-00000002", payload)
        said = []
        state = checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY), report=said.append)
        assert state["step"] == 1
        assert reason in said[0]
    assert not (directory / "owned.txt").exists()


def test_metadata_of_an_early_python_are_read(run):
    path = run[0] / "step-00000002" / ".metadata"
    genuine = pickle.loads(path.read_bytes())
    written = io.BytesIO()
    Early(written).dump(genuine)
    assert b"getattr" in written.getvalue()
    path.write_bytes(written.getvalue())
    files = {info.relative_path for info in genuine.storage_data.values()}
    assert verify.read_metadata(path, files) == genuine


def test_only_tensors_are_accepted(run):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    directory, _ = run
    path = directory / "step-00000002" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["optimizer.note"] = BytesStorageMetadata()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(verify.Damaged, match=r"BytesStorageMetadata"):
        verify.read_metadata(path, set())


def test_a_crash_while_writing_leaves_the_last_one(run, monkeypatch):
    directory, at = run
    model, optimizer = toy()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("power is gone")))
        with pytest.raises(UserError, match="power is gone"):
            checkpoint.save(directory, 3, Contents(model, optimizer, identity=IDENTITY))
    assert [step for step, _ in checkpoint.finished(directory)] == [1, 2]
    assert checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY))["step"] == 2
    assert same(values(model), at[2])
    checkpoint.save(directory, 3, Contents(model, optimizer, identity=IDENTITY))  # clears what the crash left
    assert not list(directory.glob("*.incomplete"))


def test_an_error_of_dcp_is_one_of_ours(run, monkeypatch):
    """CheckpointException is a BaseException: `except Exception` would let it pass."""
    directory, _ = run
    model, optimizer = toy()

    def fails(*args, **kwargs):
        raise checkpoint.CheckpointException("oops", {0: (OSError("no such device"), None)})

    monkeypatch.setattr(checkpoint.dcp, "save", fails)
    with pytest.raises(UserError, match="could not be written: OSError: no such device"):
        checkpoint.save(directory, 3, Contents(model, optimizer, identity=IDENTITY))
    monkeypatch.setattr(checkpoint.dcp, "load", fails)
    with pytest.raises(UserError, match="no sound checkpoint is left"):
        checkpoint.load(directory, Contents(model, optimizer, identity=IDENTITY), report=lambda _: None)


def test_a_fifo_in_the_place_of_a_checkpoints_metadata_blocks_nobody(tmp_path):
    """One rank finds that it is not a file; the others must not wait for it."""
    os.mkfifo(tmp_path / ".metadata")
    errors = []

    def read():
        try:
            read_metadata(tmp_path / ".metadata", set())
        except Damaged as error:
            errors.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert errors
    assert "is not a regular file" in errors[0]
