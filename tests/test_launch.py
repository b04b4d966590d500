"""`gluon-svrg launch` and `join`: what they say, refuse and make of engines; without MXNet, too."""

import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import jobs
import pytest
from jobs import GLUON_SVRG, assert_nothing_left, contained, finish, found_by, run, start, words_of
from kit import table

import gluon_svrg
from gluon_svrg.commands import cli
from gluon_svrg.commands.join import Rank, find_rank

PAGE = Path(__file__).parents[1] / "notebooks" / "README.several_machines.md"
SLURM = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
STEP = {"NUM_TASKS": "8", "ID": "3", "TASKS_PER_NODE": "4(x2)", "NODELIST": "node[03-05,8],other"}
SLURM.update({f"SLURM_STEP_{name}": text for name, text in STEP.items()})
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
MPIRUN.update(OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE="prterun-a-5@1")
KUBERNETES = {"JOB_COMPLETION_INDEX": "0"}


@table(
    "words, variables, message",
    ("launch -n 0 -- a", {}, "expected a positive whole number, got '0'"),
    ("launch -n x -- a", {}, "expected a positive whole number, got 'x'"),
    ("launch -n 1 --timeout -2 -- a", {}, "--timeout: invalid seconds value: '-2'"),
    ("launch -n 1", {}, "there is no command: end with -- python train.py"),
    ("launch -n 1 -- no-such-command", {}, "No such file or directory: 'no-such-command'"),
    ("launch", {}, "required: -n"),
    ("join -n 2 -- a", {}, "this process has no rank: start it by mpirun"),
    ("join -n 2 -- a", {"SLURM_PROCID": "0"}, "this process has no rank"),  # in a batch script
    ("join -n 2 -- a", MPIRUN, "on several machines, name that of rank 0: --scheduler HOST"),
    ("join -n 3 -- a", MPIRUN, "1 servers and 3 workers are 5 ranks, and there are 4: start 5"),
    ("join -n 1 -- a", MPIRUN, "1 servers and 1 workers are 3 ranks, and there are 4: start 3"),
    ("join -n 1 -- a", {"JOB_COMPLETION_INDEX": "3"}, "are 3 ranks, and there are 4: start 3"),
    ("join -n 1 --scheduler a:x -- a", {}, "invalid host_and_port value: 'a:x'"),
    ("join -n 1 --scheduler 192.0.2.1 -- a", KUBERNETES, "rank 0, the scheduler, cannot use"),
)
def test_wrong_calls(words, variables, message):
    status, output = run([*GLUON_SVRG, *words.split()], **variables)
    assert status == 2, output
    assert message in output.splitlines()[-1] and "Traceback" not in output


@pytest.mark.parametrize("command", ["launch", "join"])
def test_a_file_that_cannot_be_executed(command, tmp_path):
    """As a script of Python without its first line."""
    (tmp_path / "train").write_text("import mxnet\n")
    (tmp_path / "train").chmod(0o755)
    rank = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    status, output = run([*GLUON_SVRG, command, "-n", 1, "--", tmp_path / "train"], **rank)
    assert status == 2
    assert "Traceback" not in output
    assert re.search(f"gluon-svrg {command}: error: .*Exec format error", output)


def test_launch_as_the_first_process_of_a_container():
    """As in Docker. It inherits all orphans, and others than those of roles are no failures."""
    script = "setsid sh -c 'sleep 0.1 &'; sleep 0.5; echo trained"  # leaves an orphan
    words = [*GLUON_SVRG, "launch", "-n", 2, "--", "sh", "-c", script]
    status, output = run([*contained(), *words])
    assert status == 0
    assert sorted(output.splitlines()) == ["[worker 0] trained", "[worker 1] trained"]


@table(
    "last, code, end",
    ("exit 0", 0, None),
    ("exit 3", 3, "exited with code 3; all others were ended"),
    ("kill -9 $$", 137, "was ended by signal 9 (Killed); all others were ended"),  # as in shells
)
def test_a_command_that_is_no_python(last, code, end, marker):
    """It never joins the others; when all workers are done, the rest is ended."""
    script = f"echo $DMLC_ROLE; sleep 600 & echo a; {last}"  # which leaves something behind
    status, output = run([*GLUON_SVRG, "launch", "-n", 2, "-s", 1, "--", "sh", "-c", script])
    assert status == code
    for line in ("worker", "a"):
        assert f"[worker 0] {line}\n" in output or f"[worker 1] {line}\n" in output
    found = re.fullmatch(r"gluon-svrg launch: worker \d (.*)", output.splitlines()[-1])
    assert (found and found[1]) == end
    assert_nothing_left(marker)


def test_the_reader_goes_away(marker):
    """As in ``| head -1``: the launcher dies of its next line, and all with it."""
    script = "while :; do echo a line; sleep 0.1; done"
    process = start([*GLUON_SVRG, "launch", "-n", 1, "--", "sh", "-c", script])
    assert process.stdout.readline().startswith("[worker 0] a line")
    process.stdout.close()
    assert process.wait(30) == -signal.SIGPIPE
    assert_nothing_left(marker)


TIMED = """import time
from gluon_svrg.kvstore.job import rearm_timeout
for _ in range(4):
    rearm_timeout()
    time.sleep(1)
print('steps', flush=True)
time.sleep(4)
print('end', flush=True)
"""


def test_a_timeout_is_a_variable_too(tmp_path, marker):
    """It begins anew in each step, and has no effect where it is not set."""
    (tmp_path / "train.py").write_text(TIMED)
    for seconds, last in ((None, "end"), ("2", "steps")):
        variables = {"GLUON_SVRG_TIMEOUT": seconds} if seconds else {}
        status, output = run([sys.executable, tmp_path / "train.py"], **variables)
        assert re.search(rf"^{last}$", output, re.M), output
        assert ("end" in output.split()) == (last == "end")
        assert status == (1 if seconds else 0)
        assert ("line 7 in <module>" in output) == bool(seconds)  # where it waited


@pytest.mark.parametrize("seconds", ["abc", "nan", "-5"])
def test_a_timeout_that_is_no_number_of_seconds(seconds):
    """A trainer raises, a command ends with a sentence."""
    trains = "from gluon_svrg.kvstore.job import rearm_timeout; rearm_timeout()"
    status, output = run([sys.executable, "-c", trains], GLUON_SVRG_TIMEOUT=seconds)
    message = f"must be seconds, with 8 digits at most, got '{seconds}'"
    assert status == 1 and message in output.splitlines()[-1]
    command = [*GLUON_SVRG, "launch", "-n", 1, "--", "true"]
    status, output = run(command, GLUON_SVRG_TIMEOUT=seconds)
    message = f"gluon-svrg launch: error: argument --timeout: invalid seconds value: '{seconds}'"
    assert status == 2 and output.splitlines()[-1] == message


@table(
    "variables, expected",
    (MPIRUN, (3, 4, "prterun-a-5@1", None)),
    ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, "prterun-a-5@1", "127.0.0.1")),
    ({**SLURM, **MPIRUN}, (3, 4, "prterun-a-5@1", None)),  # mpirun in an allocation
    (SLURM, (1, 8, "7.3", "node03")),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, (1, 8, "7.3", "127.0.0.1")),
    ({**SLURM, "SLURM_STEP_NODELIST": "gpu1-[4-9]"}, (1, 8, "7.3", "gpu1-4")),
    ({**SLURM, "SLURM_STEP_NODELIST": "a,b"}, (1, 8, "7.3", "a")),
    ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3, "", None)),
    ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "8"}, (1, 8, "7.3", "node03")),  # srun --mpi=pmi2
    ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, (1, 3, "", "127.0.0.1")),
    (KUBERNETES, (0, None, "", None)),
)
def test_ranks(variables, expected):
    assert find_rank(variables) == Rank(*expected)


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


# --- where MXNet or the right NumPy is missing: in interpreters that lack them -------------------
USES = ["from gluon_svrg import SVRGTrainer", "import gluon_svrg; gluon_svrg.SVRGTrainer"]


@pytest.fixture
def without_mxnet(tmp_path):
    """Run an interpreter without site-packages, where MXNet is."""
    (tmp_path / "gluon_svrg").symlink_to(jobs.PACKAGE / "gluon_svrg")
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": ""}
    return lambda *words: run([sys.executable, "-S", *words], tmp_path, **variables)


def test_without_mxnet(without_mxnet):
    for use in USES:
        status, output = without_mxnet("-c", use)
        assert status == 1
        assert "ImportError: gluon_svrg needs MXNet, which is not installed." in output
        assert "pip install '.[cpu]' in a clone" in output
    assert without_mxnet("-m", "gluon_svrg", "--version") == (0, f"{gluon_svrg.__version__}\n")


@pytest.mark.parametrize("command", [(), ("compare",), ("launch",), ("join",)], ids=" ".join)
def test_help_without_mxnet(command, without_mxnet):
    status, output = without_mxnet("-m", "gluon_svrg", *command, "--help")
    assert status == 0 and output.startswith("usage: gluon-svrg")
    assert "example" in output and "(default: None)" not in output


@pytest.mark.parametrize("command", [("compare", "digits"), ("launch", "-n", "1", "--", "true")])
def test_commands_without_mxnet(command, without_mxnet):
    status, output = without_mxnet("-m", "gluon_svrg", *command)
    assert status == 2 and "Traceback" not in output
    assert "error: gluon_svrg needs MXNet, which is not installed." in output


def test_names():
    assert {*gluon_svrg.__all__} <= {*dir(gluon_svrg)}
    assert not {"Any", "TYPE_CHECKING", "annotations", "stores"} & {*dir(gluon_svrg)}
    assert gluon_svrg.schedule.Until(1)(0) == 1
    with pytest.raises(AttributeError, match="module 'gluon_svrg' has no attribute 'SVGRTrainer'"):
        _ = gluon_svrg.SVGRTrainer


def test_with_a_numpy_that_is_too_new(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if run([*install, tmp_path, "numpy==1.24.4"])[0]:
        pytest.skip("needs NumPy 1.24 from a package index, and none can be reached")
    for use in USES:
        path = os.pathsep.join(map(str, [tmp_path, jobs.PACKAGE]))
        status, output = run([sys.executable, "-c", use], tmp_path, PYTHONPATH=path)
        assert status == 1
        assert "ImportError: MXNet cannot be imported" in output
        assert "pip install 'numpy<1.24'" in output
