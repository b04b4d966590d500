"""`gluon-svrg join`: what it makes of what engines tell it, and of the commands of the guide."""

import re
import shlex
import socket
from pathlib import Path

import pytest
from jobs import GLUON_SVRG, assert_nothing_left, finish, found_by, run, start, words_of

from gluon_svrg.commands import cli
from gluon_svrg.commands.join import Rank, find_rank

PAGE = Path(__file__).parents[1] / "notebooks" / "README.several_machines.md"
SLURM = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
STEP = {"NUM_TASKS": "8", "ID": "3", "TASKS_PER_NODE": "4(x2)", "NODELIST": "node[03-05,8],other"}
SLURM.update({f"SLURM_STEP_{name}": text for name, text in STEP.items()})
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI.update(OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE="prterun-a-5@1")
KUBERNETES = {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    "variables, expected",
    [
        (OPEN_MPI, (3, 4, "prterun-a-5@1", None)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, "prterun-a-5@1", "127.0.0.1")),
        ({**SLURM, **OPEN_MPI}, (3, 4, "prterun-a-5@1", None)),  # mpirun in an allocation
        (SLURM, (1, 8, "7.3", "node03")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, (1, 8, "7.3", "127.0.0.1")),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu1-[4-9]"}, (1, 8, "7.3", "gpu1-4")),
        ({**SLURM, "SLURM_STEP_NODELIST": "a,b"}, (1, 8, "7.3", "a")),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3, "", None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, (1, 3, "", "127.0.0.1")),
        (KUBERNETES, (0, None, "", None)),
    ],
)
def test_ranks(variables, expected):
    assert find_rank(variables) == Rank(*expected)


@pytest.mark.parametrize(
    "options, variables, message",
    [
        (["-n", 2], {}, "no engine has told this process its rank"),
        (["-n", 2], {"SLURM_PROCID": "0"}, "no engine has told"),  # as in a batch script
        (["-n", 2], OPEN_MPI, "on several machines, name that of rank 0: --scheduler HOST"),
        (["-n", 3], OPEN_MPI, "1 servers and 3 workers are 5 ranks, and there are 4: start 5"),
        (["-n", 1], OPEN_MPI, "1 servers and 1 workers are 3 ranks, and there are 4: start 3"),
        (["-n", 1], {"JOB_COMPLETION_INDEX": "3"}, "are 3 ranks, and there are 4: start 3"),
        (["-n", 1, "--scheduler", "a:x"], {}, "invalid host_and_port value: 'a:x'"),
        (["-n", 1, "--scheduler", "192.0.2.1"], KUBERNETES, "rank 0, the scheduler, cannot use"),
    ],
)
def test_wrong_calls(options, variables, message):
    status, output = run([*GLUON_SVRG, "join", *options, "--", "true"], **variables)
    assert status == 2, output
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output


def test_an_indexed_job(tmp_path, marker):
    """With the variables that Kubernetes sets, not in a cluster of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*GLUON_SVRG, "join", "-n", 2, "--scheduler", f"localhost:{port}", "--"]
    command += words_of(tmp_path, "method")
    processes = [start(command, JOB_COMPLETION_INDEX=str(rank)) for rank in range(4)]
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert found_by(tmp_path, 2)[0]["distances"].max() < 1e-12
    assert_nothing_left(marker)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_the_manifest_of_the_guide():
    """It is valid, and its command is one of ours, with a size and an address that fit."""
    check = pytest.importorskip("kubernetes_validate", reason="needs the schemas of Kubernetes")
    import yaml

    (text,) = blocks("yaml")
    service, job = yaml.safe_load_all(text)
    for part in (service, job):
        check.validate(part, "1.30", strict=True)
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    options = cli.parser().parse_args(container["command"][1:])
    ranks = 1 + options.servers + options.workers
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == ranks
    assert options.scheduler == (f"{name}-0.{pod['subdomain']}", None)
    assert options.words == ["--", "python", "train.py"]


def test_the_commands_of_the_guide():
    """All can be parsed, so no option is misspelled; mpirun and srun start as many as needed."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    commands = [line.split("#")[0] for line in text.splitlines() if "gluon-svrg" in line]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        options = cli.parser().parse_args(words[words.index("gluon-svrg") + 1 :])
        assert options.words[:3] == ["--", "python", "train.py"], command
        for before in {"-np", "-n"} & set(words[: words.index("gluon-svrg")]):
            assert int(words[words.index(before) + 1]) == 1 + options.servers + options.workers
