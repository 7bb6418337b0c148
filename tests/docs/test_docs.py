"""The documentation is run: its python blocks, what they print, its commands, links, pictures and file names.

A ``text`` block that follows a ``python`` block is what that block prints. After a change on purpose,
``UPDATE_DOCS=1 pytest tests/docs/test_docs.py`` writes the blocks anew.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.pages import FENCE, FRAMEWORKS, WALKED, Block, blocks, rough
from tests.support.paths import ROOT, TESTS
from tests.support.runs import Heard, launched
from tests.support.slow import every_slow, long, slow
from tools.mutations import FAULTS
from zoo.training import config as cfg

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [README, *PAGES]
MAIN_JOB = "pip install -e '.[train]' -c constraints.txt && dsp-launch --nproc-per-node 2 train.py configs/demo.yaml"
SUITE = "pip install -e '.[test]' -c constraints.txt && pytest"


def python(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python"]


def execute(path: str, code: list[tuple[str, int]], names: dict[str, Any]) -> list[str]:
    """The output of each piece of code, run one after the other in one namespace; errors name the line of the page."""
    printed = []
    space = {"__name__": "__main__", **names}
    for text, line in code:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), Heard() as heard:
            exec(compile("\n" * (line - 1) + text, path, "exec"), space)
        assert not heard.texts or "warns" in text, f"{path}:{line}: {heard.texts}"
        printed.append(out.getvalue())
    return printed


def on_rank(mesh: DeviceMesh, path: str, code: list[tuple[str, int]]) -> list[str]:
    """Run pieces on one rank. Results found ahead of a run are the same on all: the first rank tells the others."""

    def told(alone: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = [alone(*args, **kwargs) if mesh.get_local_rank() == 0 else None]
            dist.broadcast_object_list(found, group=mesh.get_group(), group_src=0)
            return found[0]

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)  # the tests go on
        for module, name in ((dsp, "plan"), (dsp, "choose"), (dsp, "discover"), (dsp.embedded, "plan")):
            patch.setattr(module, name, told(getattr(module, name)))
        return execute(path, code, {"mesh": mesh})


def shown(printed: str) -> str:
    """As the pages show it: long messages wrapped, tables as they are."""
    lines: list[str] = []
    for line in printed.strip().splitlines():
        table = "─" in printed
        lines += [line] if table else textwrap.wrap(line, 118, subsequent_indent="    ") or [""]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def compare(path: Path, ran: list[Block], printed: list[str]) -> None:
    """Every text block right after a python block is what it printed; and nothing is printed unseen."""
    source, every = path.read_text(), blocks(path)
    fixed = source
    for block, out in reversed(list(zip(ran, printed))):
        after = every[every.index(block) + 1 :][:1]
        follows = after and after[0].language == "text" and not source[block.end : after[0].start].strip()
        if not follows:
            assert not out, f"{path.name}:{block.line} prints, and no text block follows:\n{out}"
            continue
        expected = after[0].text
        if rough(expected) != rough(shown(out)):
            start = source.index("\n", after[0].start) + 1
            fixed = fixed[:start] + shown(out) + fixed[start + len(expected) :]
            if not os.environ.get("UPDATE_DOCS"):
                pytest.fail(f"{path.name}:{after[0].line} shows\n{expected}\nbut the code prints\n{shown(out)}", False)
    if fixed != source:
        path.write_text(fixed)


LATE = """
diffusers diffusers-train embedded hybrids megatron planning sizing adding fold-long check inputs transformers
""".split()
LONGER = [path for path in PAGES if path.stem in LATE]
RUN = [path for path in ALL if path not in (*LONGER, *FRAMEWORKS)]


@pytest.mark.parametrize("path", [*RUN, *map(every_slow, LONGER)], ids=lambda path: path.name)
def test_pages_run_from_top_to_bottom(ranks, path: Path) -> None:
    code = python(path)
    n = (4 if path == README else 3) if any("mesh" in block.text for block in code) else 1
    printed = ranks(on_rank, n, str(path.relative_to(ROOT)), [(block.text, block.line) for block in code])
    compare(path, code, printed[0])


STARTED = "how-it-works diffusers transformers video proteins".split()
"""Pages whose programs are started by `-m slow`, those of all others by `-m long`: their blocks run in any case."""


def wanted(code: str) -> int:
    """The ranks that a program's mesh is over, 4 if it does not say."""
    found = re.search(r'init_device_mesh\("cpu", \(([\d, ]+)\)', code)
    return math.prod(map(int, filter(None, found[1].split(", ")))) if found else 4


def programs() -> Iterator[Any]:
    """Programs as a user saves and starts them: the blocks of a page as one file, of FRAMEWORKS each by itself."""
    for page in PAGES:
        code = [block.text for block in python(page)]
        if page in FRAMEWORKS:
            for i, text in enumerate(code):  # test_frameworks.py runs each on ranks
                yield (long if i else slow)(page, text, wanted(text), id=f"{page.name}-{i}")
        elif code:
            mark = slow if page.stem in STARTED else long
            yield mark(page, "".join(code), 3 if "init_device_mesh(" in "".join(code) else 0, id=page.name)
        for block in blocks(page):  # for a process of its own alone; `(...)` stands for what the reader has
            if block.language == "py" and "(...)" not in block.text and page not in WALKED:
                yield slow(page, block.text, 0, id=f"{page.name}-py")


def started(folder: Path, *command: str) -> str:
    """The output of a new process, which has to end well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}
    done = launched([sys.executable, *command], cwd=folder, env=env)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "code", "n"), [*programs()])
def test_a_page_runs_as_a_user_runs_it(tmp_path: Path, page: Path, code: str, n: int) -> None:
    """In new processes, in a folder of its own or in the checkout: with nothing that the page lacks, such as a seed."""
    (tmp_path / "page.py").write_text(code)
    assert n or "mesh" not in code
    if "import deepspeed" in code:
        pytest.importorskip("deepspeed")
    launch = ["-m", "dsp.cluster.launch", "--nproc-per-node", str(n)] if n else []
    printed = started(ROOT if '"tests/' in code else tmp_path, *launch, str(tmp_path / "page.py"))
    assert "NOT OK" not in printed
    if f"```py\n{code}" in page.read_text():
        assert f"```text\n{printed}```" in page.read_text()


@pytest.mark.slow
def test_the_readme_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("".join(block.text for block in python(README)))
    printed = started(tmp_path, "-m", "dsp.cluster.launch", "--nproc-per-node", "4", str(tmp_path / "page.py"))
    assert printed.count("check over 4 ranks in float64: ok") == 1  # printed once


def test_every_block_of_a_page_is_of_a_language_that_the_tests_know() -> None:
    known = {"python", "py", "bash", "yaml", "text", "bibtex", ""}  # reports and stages have none
    assert {block.language for path in ALL for block in blocks(path)} <= known


def test_the_configurations_of_the_pages_are_read(tmp_path: Path) -> None:
    """But for those of adding*.md, which test_adding.py trains."""
    for path in ALL:
        for block in blocks(path):
            if block.language == "yaml" and not path.stem.startswith("adding"):
                (tmp_path / "page.yaml").write_text(block.text)
                cfg.load([str(tmp_path / "page.yaml")], shown=True)


COMMANDS = [
    (line.split("#")[0].strip(), path)
    for path in ALL
    for block in blocks(path)
    if block.language == "bash"
    for line in block.text.splitlines()
]


STANDS_FOR = r"CONFIG|=latents"  # a file and a folder of the reader's
LOOKS = [line for line, _ in COMMANDS if re.search("dry_run=|help=", line) and not re.search(STANDS_FOR, line)]


@pytest.mark.parametrize("line", [long(line) for line in LOOKS])
def test_commands_that_start_no_run(line: str) -> None:
    started(ROOT, *line.split()[1:])


def test_the_commands_are_there_and_name_what_exists() -> None:
    assert {MAIN_JOB, SUITE} <= {line for line, _ in COMMANDS}
    for line, path in COMMANDS:
        for name in re.findall(r"[\w./-]+\.(?:py|yaml|txt)\b", line):
            there = (ROOT / name).exists() or f"Save this as `{name}`" in path.read_text()
            assert there, f"{line!r} names {name}, which does not exist"


def anchors(path: Path) -> set[str]:
    prose = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_links_and_pictures(path: Path) -> None:
    prose = FENCE.sub("", path.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", prose)
    assert targets
    for target in targets:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{path.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_file_names_in_prose_exist(path: Path) -> None:
    prose = FENCE.sub("", path.read_text())
    saved = re.findall(r"Save[^.`]*as `(\w+\.py)`", prose)  # the reader's
    for name in re.findall(r"`((?:dsp|zoo|tests|tools|configs|benchmarks|docs)/[\w./*-]*|\w+\.py)`", prose):
        assert name in saved or list(ROOT.glob(name.rstrip("/"))), f"{path.name} speaks of {name}"


def test_every_contract_has_a_test_in_the_short_suite() -> None:
    """The tables of docs/contracts.md: what they name is there, and not kept for `-m slow`."""
    table = [line for line in (ROOT / "docs/contracts.md").read_text().splitlines() if "::" in line]
    assert table
    for line in table:
        for name, test in re.findall(r"`(test_\w+)::(test_\w+)`", line):
            [file] = TESTS.rglob(f"{name}.py")
            assert re.search(rf"\n(?<!slow\n)def {test}\(", file.read_text()), f"{name}::{test}"


def test_the_faults_stand_in_the_code() -> None:
    """Each of tools/mutations.py once: whoever writes the line anew says anew what would be wrong with it.

    And the tests that it names are there.
    """
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.text) == 1, f"{fault.file}, {fault.name}: {fault.text}"
        for file, _, test in (name.partition("::") for name in fault.tests.split()):
            path = ROOT / f"tests/{file}.py"
            assert path.exists(), f"{fault.name}: {path}"
            assert f"def {test.partition('[')[0]}" in path.read_text(), f"{fault.name}: {file} {test}"


def test_the_tree_is_the_tree() -> None:
    (tree,) = [block.text for block in blocks(ROOT / "docs/code.md")]
    at: list[str] = []
    for line in tree.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        at = at[:depth]
        for name in re.split(r",? +", line.strip().split("   ")[0]):
            assert (ROOT / "/".join([*at, name])).exists(), f"the tree shows {name}: {line.strip()}"
        if (folder := line.strip().split()[0]).endswith("/"):
            at.append(folder.rstrip("/"))


def test_the_page_of_the_core_names_each_of_its_files() -> None:
    named = {*re.findall(r"`(\w+)`", FENCE.sub("", (ROOT / "docs/core.md").read_text()))}
    assert {path.stem for path in (ROOT / "dsp/core").glob("*.py")} - {"__init__"} <= named


def test_the_sample_is_small_and_moves() -> None:
    from PIL import Image

    path = ROOT / "docs/images/samples.gif"
    assert path.stat().st_size < 300_000
    with Image.open(path) as gif:
        assert gif.n_frames > 1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_tables_of_the_zoo_are_those_of_its_script(script) -> None:
    """All stages, and of the planned tables what takes seconds; zoo_tables.py --write makes them anew."""
    script = script("zoo_tables")
    page = [line for name in ("zoo", "zoo-stages") for line in (ROOT / f"docs/{name}.md").read_text().splitlines()]
    quick = [entry for entry in script.ENTRIES if entry.title in ("Latte V2 XL/2", "Axial video XL/2, in turn")]
    for line in (*script.stages_list(), *script.video_table(quick), *script.pair_table([(768, 8)])):
        assert line in page
