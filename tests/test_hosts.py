"""Jobs on two machines, which are network namespaces: over ssh, with mpirun, and with srun."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import hosts as machines
import numpy as np
import pytest
import slurm
from jobs import (
    GLUON_SVRG,
    SCRIPT,
    TIMEOUT,
    WITHIN,
    assert_nothing_left,
    event,
    find_role,
    finish,
    processes_of,
    start,
    variables_of,
    wait_for,
)

MISSING = machines.missing()
pytestmark = [
    pytest.mark.launchers,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
KINDS = {
    "ssh": "`launch -H` (ssh), 2 machines",
    "mpirun": "mpirun, 2 machines",
    "srun": "srun, 2 machines",
}
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
needs_slurm = pytest.mark.skipif(bool(slurm.missing()), reason=str(slurm.missing()))
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod")
CLUSTERS = [pytest.param("mpirun", marks=needs_mpirun), pytest.param("srun", marks=needs_slurm)]
ENGINES = ["ssh", *CLUSTERS]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with machines.Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    with slurm.Slurm(tmp_path_factory.mktemp("cluster"), hosts) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_new_on_the_machines(hosts):
    """All processes of a test are gone from both machines, those of ssh and Slurm included."""
    before = set(hosts.processes())
    yield
    hosts.link("up")
    deadline = time.monotonic() + 60  # Slurm's own tries for a while to reach the other machine
    while _of_jobs(hosts, before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _of_jobs(hosts, before) == {}


def _of_jobs(hosts, before):
    daemons = ("munged", "slurmctld", "slurmd", ": slurmscriptd")
    new = {number: words for number, words in hosts.processes().items() if number not in before}
    return {number: words for number, words in new.items() if not words.startswith(daemons)}


@pytest.fixture
def job(request, hosts, tmp_path, marker):
    """Start a job of two workers, one on each machine, by the engine of this name."""
    engine = request.param if hasattr(request, "param") else "ssh"
    name = "launch" if engine == "ssh" else "join"
    cluster = request.getfixturevalue("cluster") if engine == "srun" else None

    def begin(what, *options, folder=tmp_path, kvstore="dist_sync"):
        variables = cluster.environment if cluster else {}
        where = hosts.inside(0, folder)
        words = [*where, *_starter(engine, hosts), *_command(engine, hosts, options)]
        script = [sys.executable, SCRIPT, folder, what, kvstore]
        process = start([*words, "--", *script], folder, **variables)
        process.engine, process.name = engine, name
        is_horovod = ", `--horovod`" if kvstore == "horovod" else ""
        process.kind = KINDS[engine] + is_horovod
        return process

    yield begin
    hosts.link("up")


def _starter(engine, hosts):
    one, two = hosts.hostnames
    if engine == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        settings = [
            *("--mca", "plm_rsh_agent", hosts.ssh),
            *("--mca", "oob_tcp_if_include", "10.97.0.0/24"),
            *("--mca", "btl_tcp_if_include", "10.97.0.0/24"),
            *("-x", "MARKER", "-x", "PYTHONPATH", "-x", "PYTHONWARNINGS"),
        ]
        return ["mpirun", *as_root, "--host", f"{one},{two}", *settings]
    return ["srun", "-K1", "-N", 2, "-n", 2, "--overlap"] if engine == "srun" else []


def _command(engine, hosts, options):
    if engine == "ssh":
        where = ["-H", ",".join(hosts.hostnames), "--ssh", hosts.ssh, "-n", 2]
        return [*GLUON_SVRG, "launch", *where, *options]
    return [*GLUON_SVRG, "join", *options]


@pytest.mark.parametrize("job", ENGINES, indirect=True)
def test_the_same_weights_as_on_one_machine(job, tmp_path, marker):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    script = [sys.executable, SCRIPT, folders[0], "train"]
    one = start([*GLUON_SVRG, "launch", "-n", 2, "--", *script])
    output = finish(one)
    assert one.returncode == 0, output
    two = job("train", "-s", 2, folder=folders[1])
    output = finish(two)
    assert two.returncode == 0, output
    assert_same_weights(*folders)
    assert_nothing_left(marker)


def assert_same_weights(one, two):
    for rank in range(2):
        with np.load(one / f"{rank}.npz") as a, np.load(two / f"{rank}.npz") as b:
            for name in a.files:
                np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("job", ENGINES, indirect=True)
@pytest.mark.parametrize(
    "what, message",
    [
        ("raise", r"worker \d \(rank 0\).* exited with code 1"),
        ("early", r"worker \d \(rank 0\).* exited early(, with code 0)?, while worker \d"),
    ],
)
def test_workers_that_end_badly(what, message, job, tmp_path, marker, stopwatch):
    process = job(what)
    wait_for(tmp_path / "reached", process)
    seconds = stopwatch(process.kind, event(what))
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode != 0
    assert re.search(rf"^gluon-svrg {process.name}: {message}.*; all others", output, re.M), output
    assert_nothing_left(marker)


@pytest.mark.parametrize("job", ENGINES, indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["worker 1", "server 0", "scheduler"])
def test_killed_or_stopped(role, number, job, tmp_path, marker, stopwatch):
    process = job("step", "--timeout", TIMEOUT)
    wait_for(tmp_path / "reached", process)
    os.kill(find_role(marker, role), number)
    seconds = stopwatch(process.kind, event(number, role))
    output = finish(process)
    assert seconds() < WITHIN + (TIMEOUT if number == signal.SIGSTOP else 0)
    assert process.returncode != 0
    how = (
        "was killed by SIGKILL"
        if number == signal.SIGKILL
        else f"did not answer for {TIMEOUT} s(: a signal.*)?"
    )
    line = rf"^gluon-svrg {process.name}: (the )?{role}( \(rank \d\))?( on \S+)? {how}; all others"
    assert re.search(line, output, re.M), output
    assert_nothing_left(marker)


@pytest.mark.parametrize("job", ENGINES, indirect=True)
def test_the_link_goes_down(job, hosts, tmp_path, marker, stopwatch):
    """Both machines end their processes, though neither can tell the other."""
    process = job("step", "--timeout", TIMEOUT)
    wait_for(tmp_path / "reached", process)
    assert len(roles_of(marker)) == 4
    output = end_by_link(process, hosts, marker, stopwatch)
    if process.engine == "ssh":
        assert process.returncode == 1
    assert re.search(rf"did not answer for {TIMEOUT} s; all", output), output


def roles_of(marker):
    """The job's own processes, not those of its launcher."""
    return {variables_of(p).get("GLUON_SVRG_TELL") for p in processes_of(marker)} - {None}


def end_by_link(process, hosts, marker, stopwatch):
    """Take the link down, and wait until the job has ended on both machines; its output."""
    hosts.link("down")
    gone = stopwatch(process.kind, "the link between the machines goes down: no process is left")
    ended = stopwatch(process.kind, "the link between the machines goes down: the command ends")
    deadline = time.monotonic() + TIMEOUT + 4  # without the 4 where no other work is done
    while roles_of(marker):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    gone()
    if process.engine == "ssh":
        output = finish(process)
        ended()
        assert_nothing_left(marker)
    else:  # mpirun and srun wait for their own daemons there, long after the job has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            ended()
        hosts.link("up")
        for left in set(processes_of(marker)) - {os.getpid(), process.pid}:
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.terminate()
        output = finish(process)
    assert process.returncode != 0, output
    return output


@pytest.mark.parametrize("job", ENGINES, indirect=True)
def test_the_link_comes_back(job, hosts, tmp_path, marker):
    check_link_back(job, hosts, tmp_path, marker)


def check_link_back(job, hosts, tmp_path, marker, *options, kvstore="dist_sync"):
    """With the time-out off, the job goes on and ends with the same weights."""
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder in folders:
        folder.mkdir()
        process = job("train slowly", "--timeout", 0, *options, folder=folder, kvstore=kvstore)
        wait_for(folder / "reached", process)
        if folder.name == "disturbed":
            hosts.link("down")
            time.sleep(20)
            hosts.link("up")
        output = finish(process)
        assert process.returncode == 0, output
    assert_same_weights(*folders)
    assert_nothing_left(marker)


@needs_horovod
@pytest.mark.parametrize("job", CLUSTERS, indirect=True)
def test_the_link_comes_back_to_horovod(job, hosts, tmp_path, marker):
    check_link_back(job, hosts, tmp_path, marker, "--horovod", kvstore="horovod")


@needs_horovod
@pytest.mark.parametrize("job", CLUSTERS, indirect=True)
@pytest.mark.parametrize(
    "what", ["train", "raise", "early", signal.SIGKILL, signal.SIGSTOP, "link"]
)
def test_horovod(what, job, hosts, tmp_path, marker, stopwatch):
    """One worker on each machine; no ssh but mpirun's."""
    is_event = what in ("link", signal.SIGKILL, signal.SIGSTOP)
    begin = "step" if is_event else what
    process = job(begin, "--horovod", "--timeout", TIMEOUT, kvstore="horovod")
    if what == "train":
        output = finish(process)
        assert process.returncode == 0, output
        with np.load(tmp_path / "0.npz") as a, np.load(tmp_path / "1.npz") as b:
            for name in a.files:
                np.testing.assert_array_equal(a[name], b[name])
        assert_nothing_left(marker)
        return
    wait_for(tmp_path / "reached", process)
    if what == "link":
        output = end_by_link(process, hosts, marker, stopwatch)
        message = "did not answer for"
    else:
        if is_event:
            os.kill(find_role(marker, "worker 1"), what)
        seconds = stopwatch(process.kind, event(what))
        output = finish(process)
        assert seconds() < WITHIN + (TIMEOUT if what == signal.SIGSTOP else 0)
        assert process.returncode != 0
        assert_nothing_left(marker)
        message = {
            "raise": r"worker 0 \(rank 0\).* exited with code 1",
            "early": r"worker 1 .* code 1, after worker 0 \(rank 0\).* had ended with code 0",
            signal.SIGKILL: r"worker 1 \(rank 1\) on node-b was killed by SIGKILL",
            signal.SIGSTOP: rf"worker 1 \(rank 1\) on node-b did not answer for {TIMEOUT} s",
        }[what]
    assert re.search(rf"^gluon-svrg join: .*{message}", output, re.M), output


def by_hand(hosts, rank, folder, what, *options):
    """A process of a job that no launcher has started, on the machine of its number."""
    words = [*hosts.inside(rank, folder), *GLUON_SVRG, "join", "--rank", rank, "--size", 2]
    return start([*words, *options, "--", sys.executable, SCRIPT, folder, what], folder)


def test_a_token_lets_another_machine_in(hosts, tmp_path, marker):
    """Strangers there do not get in, and rank 0 listens on no other address."""
    (tmp_path / "token").write_text("a secret of at least 16 characters")
    options = ["--scheduler", "node-a:9753", "--token-file", tmp_path / "token"]
    first = by_hand(hosts, 0, tmp_path, "nothing", *options)
    script = (
        "import socket, sys, time\n"
        "until = time.monotonic() + 60\n"
        "while time.monotonic() < until:\n"
        "    try:\n"
        "        client = socket.create_connection(('10.97.0.1', 9753), 5)\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.1)\n"
        'client.sendall(b\'{"token": "", "rank": 1, "size": 2, "host": "x"}\\n\')\n'
        "print(len(client.recv(65)), client.recv(100))\n"
    )
    stranger = start([*hosts.inside(1), sys.executable, "-c", script])
    assert finish(stranger) == "65 b''\n"
    listening = start([*hosts.inside(0), "ss", "-Hltn", "sport = 9753"])
    assert finish(listening).split()[3] == "10.97.0.1:9753"
    second = by_hand(hosts, 1, tmp_path, "nothing", *options)
    outputs = [finish(process) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert_nothing_left(marker)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_other_machine_without_a_token(rank, hosts, tmp_path, marker):
    process = by_hand(hosts, rank, tmp_path, "nothing", "--scheduler", "node-a:9754")
    output = finish(process)
    assert process.returncode == 2
    assert "--scheduler node-a:9754 needs a secret that all processes" in output
    assert_nothing_left(marker)


def test_a_taken_port(job, hosts, tmp_path, marker):
    """`launch -H` says so at once, before it starts anything."""
    script = (
        "import socket, sys, time\n"
        "server = socket.create_server(('', 9755))\n"
        "print('taken', flush=True)\n"
        "time.sleep(600)\n"
    )
    holder = start([*hosts.inside(0), sys.executable, "-c", script])
    assert holder.stdout.readline() == "taken\n"
    since = time.monotonic()
    process = job("nothing", "--port", 9755)
    output = finish(process)
    seconds = time.monotonic() - since
    holder.kill()
    finish(holder)
    assert process.returncode == 2
    line = "gluon-svrg launch: error: cannot use port 9755: Address already in use, on node-a"
    assert output.splitlines()[-1] == line
    assert seconds < WITHIN  # 2 s where no other work is done
    assert_nothing_left(marker)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_is_ended(number, job, tmp_path, marker, stopwatch):
    process = job("step")
    wait_for(tmp_path / "reached", process)
    process.send_signal(number)
    seconds = stopwatch(process.kind, f"its launcher gets {number.name}")
    output = finish(process)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"was ended by {number.name}" in output.splitlines()[-1]
    assert_nothing_left(marker, seconds=WITHIN)
    seconds()


@pytest.mark.parametrize("which", ["ssh", "agent"])
def test_a_connection_dies(which, job, hosts, tmp_path, marker, stopwatch):
    process = job("step")
    wait_for(tmp_path / "reached", process)
    program = "ssh -F" if which == "ssh" else f"{sys.executable} -m gluon_svrg.commands.agent"
    wanted = [number for number, words in hosts.processes().items() if words.startswith(program)]
    assert len(wanted) == 2
    os.kill(wanted[1], signal.SIGKILL)
    what = "ssh" if which == "ssh" else "what ssh started there"
    seconds = stopwatch(process.kind, f"{what} is killed")
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode == 1
    assert "is out of reach: the connection has ended; all others were ended" in output
    assert_nothing_left(marker)


def test_it_goes_on_without_a_machine(job, hosts, tmp_path, marker):
    """A machine that vanishes for good: the rest starts again from what was saved."""
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder in folders:
        folder.mkdir()
    process = job("train slowly", folder=folders[0])
    finish(process)
    process = job("train slowly", "--timeout", TIMEOUT, "--restart", 1, folder=folders[1])
    wait_for(folders[1] / "saved-1-2-weights", process)
    hosts.link("down")
    output = finish(process)
    assert process.returncode == 0, output
    assert re.search("node-b did not answer .*; starting again .1 of 1.|starting again", output)
    assert_same_weights(*folders)
    hosts.link("up")
    assert_nothing_left(marker, seconds=WITHIN)


def test_too_few_machines_are_left(hosts, tmp_path, marker):
    where = ",".join(f"{address}:1" for address in hosts.hostnames)
    words = [*GLUON_SVRG, "launch", "-H", where, "--ssh", hosts.ssh, "-n", 2, "--restart", 3]
    more = ["--timeout", TIMEOUT, "--", sys.executable, SCRIPT, tmp_path, "step"]
    process = start([*hosts.inside(0), *words, *more])
    try:
        wait_for(tmp_path / "reached", process)
        hosts.link("down")
        output = finish(process)
    finally:
        hosts.link("up")
    assert process.returncode == 2
    assert "2 workers need as many slots, and the machines have 1" in output.splitlines()[-1]
    assert_nothing_left(marker, seconds=WITHIN)


def test_the_same_environment(hosts, tmp_path, marker):
    """Words, variables and the working folder arrive as they are."""
    folder = tmp_path / "a folder; it's $HOME"
    folder.mkdir()
    value = 'it\'s "mine" $HOME\nand `yours` \\ é'
    script = 'import os, sys; print(repr((sys.argv[1:], os.environ["OWN"], os.getcwd())))'
    words = ["two words", "$HOME *", "it's", 'a "quote"', "", "--", "-n", "é"]
    where = ["-H", ",".join(hosts.hostnames), "--ssh", hosts.ssh, "-n", 2]
    command = [*GLUON_SVRG, "launch", *where, "--", sys.executable, "-c", script, *words]
    process = start([*hosts.inside(0, folder), *command], folder, OWN=value)
    output = finish(process)
    assert process.returncode == 0, output
    expected = repr((words, value, str(folder)))
    for worker in range(2):
        assert f"[worker {worker}] {expected}" in output.splitlines()
    assert_nothing_left(marker)


@pytest.mark.parametrize(
    "address, program, message",
    [
        ("10.97.0.9", "ssh", "10.97.0.9 is out of reach"),
        ("node-b", "ssh -p 2223", "node-a is out of reach"),
    ],
)
def test_no_connection(address, program, message, hosts, marker):
    shell = hosts.ssh.replace("ssh", program, 1).replace("-p 2222", "", "2223" in program)
    words = ["launch", "-H", f"node-a,{address}", "--ssh", shell, "-n", 1, "--", "true"]
    process = start([*hosts.inside(0), *GLUON_SVRG, *words])
    output = finish(process, 100)
    assert process.returncode == 2, output
    assert message in output.splitlines()[-1]
    assert_nothing_left(marker)


def test_a_folder_that_is_not_there(hosts, tmp_path, marker):
    """The other machine has its own disk: it may lack the working folder, or the command."""
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\nrmdir {gone} 2>/dev/null\nexec {hosts.ssh} "$@"\n')
    shell.chmod(0o755)
    words = ["launch", "-H", "node-b", "--ssh", shell, "-n", 1, "--", "true"]
    process = start([*hosts.inside(0, gone), *GLUON_SVRG, *words], gone)
    output = finish(process)
    assert process.returncode == 2, output
    assert f"No such file or directory: {gone}, on node-b" in output.splitlines()[-1]
    words = ["launch", "-H", "node-b", "--ssh", hosts.ssh, "-n", 1, "--", "no-such-command"]
    process = start([*hosts.inside(0), *GLUON_SVRG, *words])
    output = finish(process)
    assert process.returncode == 2, output
    assert "cannot start no-such-command: No such file" in output.splitlines()[-1]
    assert_nothing_left(marker)


@needs_slurm
def test_sbatch(cluster, tmp_path, marker):
    """A batch script that calls srun."""
    script = tmp_path / "job.sh"
    join = " ".join(map(str, [*GLUON_SVRG, "join", "--", sys.executable, SCRIPT, tmp_path]))
    script.write_text(f"#!/bin/sh\n#SBATCH -N 2 -n 2\nsrun {join} nothing\n")
    from jobs import environment

    os.environ.update(environment())
    done = cluster.run("sbatch", "--wait", "-o", tmp_path / "output", script)
    output = Path(tmp_path / "output").read_text()
    assert done.returncode == 0, (done.stderr, output, cluster.logs())
    assert re.search(r"^\[worker 1\] rank \d of 2$", output, re.M)
    assert_nothing_left(marker)
