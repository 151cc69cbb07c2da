"""The job files of docs/many-workers.md are what Slurm's shell and Kubernetes can read."""

import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "many-workers.md").read_text(encoding="utf-8")


def block(heading: str) -> str:
    """The indented lines under a heading, the first such block."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = section.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    "))
    end = next((number for number in range(start, len(lines)) if lines[number][:1].strip()), len(lines))
    return textwrap.dedent("\n".join(lines[start:end])).strip() + "\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_job_starts_torchrun_once_a_node(tmp_path: Path) -> None:
    """Commands of Slurm are replaced by ones that say what they were given."""
    for name, does in (("scontrol", "printf 'first\\nsecond\\n'"), ("srun", 'exec "$@"'), ("torchrun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    job = block("Slurm")
    assert "#SBATCH --nodes=2\n" in job
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
    }
    done = subprocess.run(["bash", "-eu", "-c", job], env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.split()
    assert said[:8] == ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8", "--master-addr", "first"]
    assert said[10:13] == ["-m", "sparsepack", "calibrate"]


def test_the_kubernetes_job_gives_each_pod_its_number_and_finds_the_first() -> None:
    found: list[dict[str, Any]] = list(yaml.safe_load_all(block("Kubernetes")))
    assert [each["kind"] for each in found] == ["Service", "Job"]
    service, job = found
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (command,) = container["args"]
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{spec['subdomain']} " in command
    assert f"--nnodes {job['spec']['completions']} --node-rank $JOB_COMPLETION_INDEX " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
