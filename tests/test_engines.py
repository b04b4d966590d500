"""Jobs by every engine: the weights of one process, and an end when anything goes wrong.

Engines are gluon-svrg, Open MPI, Slurm and Horovod, on one machine or two: network namespaces,
node-a and node-b, with a link between them and a name each.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import jobs
import pytest

BESIDE = Path(sys.executable).parent  # programs of this environment
PROGRAMS = {"4": "/usr/bin/mpirun", "5": str(BESIDE / "mpirun")}
SYSTEM = "/usr/sbin:/sbin:" + os.environ["PATH"]
NAMES = [f"{kind}_ALLOW_RUN_AS_ROOT" for kind in ("OMPI", "PRTE")]
AS_ROOT = {f"{name}{end}": "1" for name in NAMES for end in ("", "_CONFIRM")}
ENGINES = ["launch", "mpirun 4", "mpirun 5", "horovodrun"]
ENGINES += [f"{engine}, two machines" for engine in ("mpirun 4", "mpirun 5", "srun")]


@lru_cache(maxsize=None)
def missing(engine):
    """Why an engine cannot start jobs here, or None."""
    if engine == "horovodrun":
        return None if find_spec("horovod") else "needs Horovod: .ci/horovod builds it"
    if engine.startswith("mpirun"):
        program, version = PROGRAMS[engine[7]], engine[7]
        run = [program, "--version"] if os.access(program, os.X_OK) else ["true"]
        said = subprocess.run(run, capture_output=True, text=True, check=False).stdout
        if f"(Open MPI) {version}." not in said:
            return f"needs Open MPI {version} as {program}: .ci/launchers installs it"
    if "two machines" not in engine:
        return None
    wanted = ["ip", "nsenter", "unshare"]
    if engine.startswith("srun"):
        wanted += ["munged", "slurmctld", "slurmd", "srun"]
    absent = [program for program in wanted if shutil.which(program, path=SYSTEM) is None]
    if absent:
        return f"needs {' and '.join(absent)}: .ci/launchers installs them"
    name = f"svrg-try-{os.getpid()}"
    script = f"ip netns add {name} && ip netns delete {name} && unshare --uts --mount true"
    made = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    return f"needs namespaces: {made.stderr.strip()}" if made.returncode else None


class Machines:
    """Two machines, and on request a Slurm that runs jobs on them."""

    names, addresses = ("node-a", "node-b"), ("10.97.0.1", "10.97.0.2")

    def __init__(self, folder):
        self.folder, self._daemons, self.has_slurm = Path(folder), [], False
        self.slurm = {"SLURM_CONF": str(self.folder / "slurm.conf")}  # where its programs find it
        self._spaces = [f"svrg-{os.getpid()}-{letter}" for letter in "ab"]

    def __enter__(self):
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names))]
        (self.folder / "names").write_text("\n".join(lines) + "\n")
        one, two = (f"sv{os.getpid()}{letter}" for letter in "ab")
        for space in self._spaces:
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", one, "type", "veth", "peer", "name", two)
        for space, link, address in zip(self._spaces, (one, two), self.addresses):
            _run("ip", "link", "set", link, "netns", space)
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", space, "link", "set", link, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
        for space, name in zip(self._spaces, self.names):
            script = f"hostname {name} && mount --bind {self.folder}/names /etc/hosts"
            script += f" && touch {self.folder}/{name} && exec sleep infinity"
            enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--uts", "--mount"]
            self._daemon([*enter, "sh", "-c", script])
            jobs.wait_for(self.folder / name, self._daemons[-1])
        agent = self.folder / "agent"  # in place of ssh
        lines = ["#!/bin/sh", "host=$1; shift", 'case "$host" in']
        for number, name in enumerate(self.names):
            lines.append(f'{name}) exec {" ".join(self.on(number))} sh -c "$*" ;;')
        agent.write_text("\n".join([*lines, "esac", ""]))
        agent.chmod(0o755)
        return self

    def __exit__(self, *error):
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for space in self._spaces:
            for process in _run("ip", "netns", "pids", space).split():
                os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "delete", space)
        for daemon in self._daemons:
            daemon.wait(10)

    def on(self, number, folder="/"):
        """The words before a command that is to run on a machine, in a folder."""
        process = self._daemons[number].pid
        return ["nsenter", f"--target={process}", "--net", "--uts", "--mount", f"--wd={folder}"]

    def _daemon(self, command):
        variables = {k: v for k, v in os.environ.items() if k != "MARKER"}
        with (self.folder / "daemons.log").open("a") as log:
            settings = {"stdout": log, "stderr": log, "start_new_session": True}
            variables.update(self.slurm, PATH=SYSTEM)
            self._daemons.append(subprocess.Popen([*map(str, command)], env=variables, **settings))

    def start_slurm(self):
        folder, cores = self.folder, os.cpu_count()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(SLURM.format(folder=folder, cores=cores))
        # munge insists on folders that nobody else can write, which temporary ones are not
        files = ["key-file=key", "socket=munge", "seed-file=seed", "pid-file=pid", "log-file=log"]
        options = [f"--{file.replace('=', f'={folder}/')}" for file in files]
        self._daemon([*self.on(0), "munged", "-F", "--force", *options])
        jobs.wait_for(folder / "munge", self._daemons[-1])
        self._daemon([*self.on(0), "slurmctld", "-D"])
        for number, name in enumerate(self.names):
            self._daemon([*self.on(number), "slurmd", "-D", "-N", name])
        info = [*self.on(0), "sinfo", "-h", "-o", "%T %D"]
        deadline = time.monotonic() + 60
        while _run(*info, env={**os.environ, **self.slurm}).split() != ["idle", "2"]:
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.5)
        self.has_slurm = True


SLURM = """\
ClusterName=test
SlurmctldHost=node-a(10.97.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=60
KillWait=5
SelectType=select/cons_tres
NodeName=node-a NodeAddr=10.97.0.1 CPUs={cores}
NodeName=node-b NodeAddr=10.97.0.2 CPUs={cores}
PartitionName=all Nodes=node-a,node-b Default=YES State=UP OverSubscribe=FORCE:8
"""


def begin(engine, machines, folder, words, *options):
    """Start a job of two workers and a server, whose command has these words."""
    variables, where, prefix = {"PATH": f"{BESIDE}:{SYSTEM}", **AS_ROOT}, [], []
    roles = ["-n", 2, "-s", 1, *options]
    if engine == "launch":
        return jobs.start([*jobs.GLUON_SVRG, "launch", *roles, "--", *words], folder, **variables)
    if engine == "horovodrun":
        seconds = {"GLUON_SVRG_TIMEOUT": str(options[1])} if options else {}
        return jobs.start_horovod(2, words, folder, **seconds)
    if "two machines" in engine:
        where = machines.on(0, folder)
    if engine.startswith("mpirun"):
        version = engine[7]
        prefix = [PROGRAMS[version], "--map-by", ":OVERSUBSCRIBE", "-np", 4]
        if where:
            agent = {"4": ("--mca", "plm_rsh_agent"), "5": ("--prtemca", "plm_ssh_agent")}[version]
            prefix += ["--host", "node-a:2,node-b:2", *agent, machines.folder / "agent"]
            for name in ("MARKER", "PYTHONPATH", "PYTHONWARNINGS", "PATH"):
                prefix += ["-x", name]
            roles += ["--scheduler", "node-a"]
    else:
        if not machines.has_slurm:
            machines.start_slurm()
        prefix = ["srun", "--kill-on-bad-exit", "-N", 2, "-n", 4, "--overlap"]
        variables.update(machines.slurm)
    words = [*jobs.GLUON_SVRG, "join", *roles, "--", *words]
    return jobs.start([*where, *prefix, *words], folder, **variables)


def _run(*command, **settings):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


TIMEOUT = 8  # seconds
WITHIN = 15  # seconds from an event to the end, beside the time-out
SERVED = [engine for engine in ENGINES if engine != "horovodrun"]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if missing("mpirun 4, two machines") and missing("srun, two machines"):
        yield None
        return
    with Machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture
def job(request, tmp_path, marker):
    started = []

    def start(engine, *words_and_options):
        if missing(engine):
            pytest.skip(missing(engine))
        machines = request.getfixturevalue("machines") if "two machines" in engine else None
        started.append(begin(engine, machines, tmp_path, *words_and_options))
        return started[-1]

    yield start
    for process in started:
        jobs.end(process)


@pytest.mark.slow
@pytest.mark.parametrize("engine", SERVED)
def test_the_weights_of_one_process(engine, job, tmp_path, marker):
    """In float64, with the update on the workers; Horovod's are in `test_workers`."""
    process = job(engine, jobs.words_of(tmp_path, "method"))
    output = jobs.finish(process)
    assert process.returncode == 0, output
    found = jobs.found_by(tmp_path, 2)
    jobs.assert_identical(found)
    print(f"\n{engine} | difference from one process | {found[0]['distances'].max():.1e}")
    assert found[0]["distances"].max() < 1e-12
    jobs.assert_nothing_left(marker)


def is_role(role, process):
    words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    if role == "worker":
        return words[1:2] == [str(jobs.WORKER)]
    is_ours = words[1] == "-c" and words[2].endswith("import mxnet")
    return is_ours and jobs.variables_of(process)["DMLC_ROLE"] == role


ENDS = [
    *(("killed", role) for role in ("worker", "server", "scheduler")),
    *(("stopped", role) for role in ("worker", "server", "scheduler")),
    ("raise", "worker"),
    ("uneven", "worker"),
    ("early", "worker"),
    *((name, "launcher") for name in ("SIGINT", "SIGTERM", "SIGKILL")),
]
PLAIN = [("launch", "raise", "worker"), ("launch", "killed", "server")]
PLAIN += [("launch", "uneven", "worker"), ("launch", "SIGKILL", "launcher")]
CASES = [
    pytest.param(engine, *way, marks=() if (engine, *way) in PLAIN else pytest.mark.slow)
    for engine in ENGINES
    for way in ENDS
    if engine != "horovodrun" or way[1] in ("worker", "launcher")
]


@pytest.mark.parametrize("engine, what, who", CASES)
def test_ends(engine, what, who, job, tmp_path, marker):
    """All processes of the job end, and its status is not 0."""
    is_silent = what in ("stopped", "uneven", "early")
    # Steps need no scheduler, but the end of a worker does.
    program = "short" if (what, who) == ("stopped", "scheduler") else what
    kvstore = "horovod" if engine == "horovodrun" else "dist_sync"
    options = ["--timeout", TIMEOUT] if is_silent else []
    settings = {"folder": str(tmp_path), "what": program, "kvstore": kvstore}
    process = job(engine, jobs.words_of(tmp_path, "disturbed", **settings), *options)
    for rank in range(2):
        jobs.wait_for(tmp_path / f"reached-{rank}", process)
    since = time.monotonic()
    if what in ("killed", "stopped"):
        number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
        processes = [each for each in jobs.processes_of(marker) if is_role(who, each)]
        os.kill(max(processes), number)  # of several workers, the one that has started last
    elif who == "launcher":
        times = 2 if "srun" in engine and what == "SIGINT" else 1  # srun wants Ctrl-C twice
        for _ in range(times):
            process.send_signal(getattr(signal, what))
            time.sleep(0.2)
    output = jobs.finish(process, 60)
    ended = time.monotonic() - since
    if (engine, what) != ("horovodrun", "SIGINT"):  # its status is 0 after Ctrl-C
        assert process.returncode != 0, output
    jobs.assert_nothing_left(marker, seconds=WITHIN)
    gone = time.monotonic() - since
    # With pytest -rP:
    print(f"\n{engine} | {who} {what} | {ended:.1f} s, and nothing left after {gone:.1f} s")
    assert ended < WITHIN + (TIMEOUT if is_silent else 0)
    if what == "raise":
        assert "ValueError: mine" in output
    if is_silent:
        assert re.search(rf"Timeout \(0:00:0{TIMEOUT}\)!", output), output
    if what == "uneven":
        assert "in disturbed" in output  # where it has waited
