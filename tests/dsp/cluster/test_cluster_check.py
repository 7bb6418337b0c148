"""The first check of a cluster, on four gloo ranks that take themselves for one host or for two."""

import importlib
import json

import pytest


def script():
    return importlib.import_module("dsp.cluster.check")


def run_here(mesh, arguments, hosts, fault=False, only_links=False):
    """The check as a rank of the pool runs it; `fault`: with numbers of its own and another plan."""
    import torch.distributed as dist

    check, rank = script(), dist.get_rank()
    plain = check.socket.gethostname, check.small_model, check.plan, check.exactness, check.loss_and_bytes
    check.socket.gethostname = lambda: hosts[rank]

    def uneven_numbers(device):
        model = plain[1](device)
        model.layers[0]["space"].out.register_forward_hook(lambda module, args, out: out + rank)
        return model

    class Planned:
        bytes = {"forward": 1, "backward": 1}

    if fault:
        check.small_model = uneven_numbers
        check.plan = lambda *args, **kwargs: Planned
    if only_links:
        check.exactness, check.loss_and_bytes = (lambda mesh: check.Finding("ok", "exactness", "")), lambda mesh: []
    try:
        return check.main(["--megabytes", "0.1", "--rounds", "1", *arguments])
    finally:
        check.socket.gethostname, check.small_model, check.plan, check.exactness, check.loss_and_bytes = plain


def found(path):
    report = json.loads(path.read_text())
    return report, {state: [f for f in report["findings"] if f["state"] == state] for state in ("warning", "FAILED")}


@pytest.mark.slow
def test_one_host(whole_world, tmp_path):
    out = tmp_path / "check.json"
    assert whole_world(run_here, 2, ["--out", str(out)], ["a"] * 2) == [0] * 2
    report, bad = found(out)
    assert bad == {"warning": [], "FAILED": []}
    assert (report["sp"], report["hosts"], report["backend"]) == (2, {"a": 2}, "gloo")
    assert list(report["links"]) == ["sp=2"]
    (row,) = report["links"]["sp=2"]["sizes"]
    assert row["raw"] > 0
    assert row["switch"] > 0
    assert any("as planned" in finding["text"] for finding in report["findings"])


def test_two_hosts(whole_world, tmp_path):
    within, across = tmp_path / "within.json", tmp_path / "across.json"
    hosts = ["a", "a", "b", "b"]
    assert whole_world(run_here, 4, ["--out", str(within)], hosts, False, True) == [0] * 4
    report, bad = found(within)
    assert report["sp"] == 2
    assert list(report["links"]) == ["sp=2", "between hosts"]
    assert not bad["warning"]
    assert whole_world(run_here, 4, ["--sp", "4", "--out", str(across)], hosts, False, True) == [0] * 4
    report, bad = found(across)
    assert list(report["links"]) == ["sp=4", "within a host", "between hosts"]
    assert [finding["what"] for finding in bad["warning"]] == ["hosts"]
    assert "sp=4 crosses hosts in 1 of 1 groups (ranks 0 to 3 first)" in bad["warning"][0]["text"]
    assert "sp=2 would stay within a host" in bad["warning"][0]["text"]
    assert [f["text"] for f in report["findings"] if "route='auto' switches over 2 nodes of 2: " in f["text"]]


@pytest.mark.slow
def test_faults_are_found(whole_world, tmp_path):
    out = tmp_path / "check.json"
    assert whole_world(run_here, 4, ["--out", str(out)], ["a"] * 4, True) == [1] * 4
    _, bad = found(out)
    assert [finding["what"] for finding in bad["FAILED"]] == ["exactness", "exactness", "bytes"]
    assert "NOT OK" in bad["FAILED"][0]["text"]
    assert "planned were 1 and 1" in bad["FAILED"][2]["text"]


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no launcher has started this rank: dsp-launch"),
        (LAUNCHED | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x': expected a number"),
        (LAUNCHED | {"RANK": "1"}, "RANK='1': expected a number from 0 to 0"),
        (LAUNCHED | {"MASTER_PORT": ""}, "RANK is set, but MASTER_PORT is not"),
    ],
)
def test_a_rank_without_a_place_is_one_line(monkeypatch, capsys, variables, said):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert script().main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_versions_are_the_same_everywhere():
    check = script()
    one = {"python": "3.11.7", "torch": "2.13.0", "nccl": "none"}
    assert str(check.same_versions([one, one])).split(maxsplit=2) == ["ok", "versions", "python 3.11.7, torch 2.13.0"]
    mixed = check.same_versions([one, one | {"torch": "2.12.1"}])
    assert (mixed.state, mixed.text) == ("FAILED", "not the same on every rank: torch 2.12.1 and 2.13.0")


def test_layouts_on_paper():
    check = script()
    sp, findings = check.layout(["a"] * 8 + ["b"] * 8, None)
    assert sp == 8
    assert [finding.state for finding in findings] == ["ok", "ok"]
    sp, findings = check.layout(["a"] * 3 + ["b"] * 5, 2)
    assert "3 to 5 ranks each" in findings[0].text
    assert "crosses hosts in 1 of 4 groups (ranks 2 to 3 first)" in findings[1].text
    assert "sp=1 would stay" in findings[1].text
    _, findings = check.layout(["a", "b"] * 2, 2)
    assert any("not consecutive" in finding.text for finding in findings)
    with pytest.raises(ValueError, match="--sp 3 must divide the number of ranks, 4"):
        check.layout(["a"] * 4, 3)
    assert check.groupings(["a", "b"], 1) == {"between hosts": [[0, 1]]}
    assert check.groupings(["a"], 1) == {}
    assert check.groupings(["a"] * 2 + ["b"] * 2, 2) == {
        "sp=2": [[0, 1], [2, 3]],
        "between hosts": [[0, 2], [1, 3]],
    }
