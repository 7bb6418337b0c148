"""The launch files for clusters: the script of Slurm is run, with stand-ins for Slurm's commands."""

import os
import signal
import subprocess
import time

import pytest
import yaml

from tests.support.paths import ROOT

SLURM = ROOT / "configs/cluster/slurm.sh"
STANDINS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> "$HERE/asked"; fi',
    "scancel": 'echo "scancel $@" >> "$HERE/asked"; kill -TERM $(cat "$HERE/step")',
    "srun": """
echo "$@ timeout=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$HERE/started"
trap 'echo checkpoint >> "$HERE/asked"; exit 1' TERM
echo $$ > "$HERE/step"
while [ -e "$HERE/busy" ]; do sleep 0.05; done
exit $(cat "$HERE/status")
""",
}


@pytest.fixture
def slurm(tmp_path):
    """A place to run the script in, and the script, started there."""
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "busy").touch()
    (tmp_path / "status").write_text("0")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HERE": str(tmp_path), "SLURM_JOB_ID": "42", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }  # fmt: skip
    process = subprocess.Popen(["bash", str(SLURM), "configs/demo.yaml", "train.steps=9"], env=environment)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "step").exists() and (tmp_path / "step").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield tmp_path, process
    (tmp_path / "busy").unlink(missing_ok=True)
    process.wait(60)


def asked(place):
    return (place / "asked").read_text().splitlines() if (place / "asked").exists() else []


def test_slurm_starts_ranks_and_passes_its_status_on(slurm):
    place, process = slurm
    (place / "status").write_text("3")
    (place / "busy").unlink()
    assert process.wait(60) == 3
    assert asked(place) == []  # an error of the run is not tried again
    assert (place / "started").read_text().split() == (
        "--kill-on-bad-exit=1 dsp-launch --nnodes 2 --nproc-per-node 8 --rdzv-id 42 --rdzv-backend c10d "
        "--rdzv-endpoint node7:20042 train.py configs/demo.yaml train.steps=9 resume=true timeout=540"
    ).split()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_is_asked_to_queue_a_stopped_run_again(slurm, number):
    place, process = slurm
    process.send_signal(number)
    assert process.wait(60) == 1
    assert asked(place) == ["scancel --signal=TERM 42", "checkpoint", "requeue 42"]


def test_the_options_for_slurm():
    lines = SLURM.read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options["signal"] == "B:USR1@600"  # seconds: more than what torchrun waits for its ranks
    assert "requeue" in options
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"


def test_kubernetes_pods_find_and_outlast_each_other():
    service, job = yaml.safe_load_all((ROOT / "configs/cluster/kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{pod['subdomain']}" in command
    assert f"--nnodes {spec['completions']} " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
    assert command.startswith("exec dsp-launch")  # the signal has to reach the launcher, not a shell
    assert "resume=true" in command
    assert (ROOT / command.split("train.py ")[1].split()[0]).exists()
    patience = {v["name"]: int(v["value"]) for v in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 30 < patience < pod["terminationGracePeriodSeconds"]
    assert spec["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert mounted["shared-memory"] == "/dev/shm"


def test_the_image_is_one_that_a_file_here_builds():
    lines = (ROOT / "configs/cluster/kubernetes.yaml").read_text().splitlines()
    name = next(line.split()[-1] for line in lines if "image:" in line)
    recipe = (ROOT / "configs/cluster/Dockerfile").read_text()
    assert f"-t {name} ." in recipe
    assert "WORKDIR /dsp" in recipe


def test_the_page_explains_what_the_script_says():
    page = (ROOT / "docs/cluster.md").read_text()
    for line in SLURM.read_text().splitlines():
        option = line.removeprefix("#SBATCH ").partition("=")[0]
        if line.startswith("#SBATCH") and option not in ("--job-name", "--output"):
            assert f"`{option}" in page, option
