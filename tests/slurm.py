"""Slurm, started for a test: a controller, and a node on each of the machines of `hosts`."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

PATH = "/usr/sbin:" + os.environ["PATH"]
DAEMONS = ("munged", "slurmctld", "slurmd")


def missing():
    """Why there can be no Slurm here, or None."""
    for program in (*DAEMONS, "srun", "sbatch"):
        if shutil.which(program, path=PATH) is None:
            return f"needs {program}"
    return None if os.geteuid() == 0 else "needs root, for Slurm's daemons"


class Slurm:
    """A cluster of two nodes, on two machines."""

    def __init__(self, folder, hosts):
        self.folder, self.hosts = Path(folder) / "slurm", hosts
        self._daemons = []

    def __enter__(self):
        self.folder.mkdir(mode=0o755)
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o600)
        self._configure()
        # munge insists on folders that nobody else can write, which temporary ones are not
        self._start(
            0,
            *("munged", "-F", "--force", f"--key-file={self.folder}/key"),
            *(f"--socket={self.folder}/munge", f"--seed-file={self.folder}/seed"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
        )
        deadline = time.monotonic() + 60
        while not (self.folder / "munge").exists():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)
        self._start(0, "slurmctld", "-D")
        for number, node in enumerate(self.hosts.hostnames):
            self._start(number, "slurmd", "-D", "-N", node)
        while self.run("sinfo", "-h", "-o", "%T %D").stdout.split() != ["idle", "2"]:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)
        return self

    def __exit__(self, *error):
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    @property
    def environment(self):
        """The variables by which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command, **settings):
        """Run one of Slurm's commands on the first machine."""
        return subprocess.run(
            [*self.hosts.inside(0), *map(str, command)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            **settings,
        )

    def logs(self):
        """What the daemons have said."""
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{file.name}: {file.read_text()[-3000:]}" for file in files)

    def _start(self, number, program, *arguments):
        name = "-".join([program, *arguments[-1:]]).replace("/", "_")
        variables = {k: v for k, v in os.environ.items() if k != "MARKER"}
        with (self.folder / f"{name}.out").open("w") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*self.hosts.inside(number), program, *arguments],
                    env={**variables, **self.environment, "PATH": PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _configure(self):
        one, two = self.hosts.addresses
        first, second = self.hosts.hostnames
        cores = os.cpu_count()
        (self.folder / "slurm.conf").write_text(
            f"""\
ClusterName=test
SlurmctldHost={first}({one})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge
CredType=cred/munge
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=60
KillWait=5
SelectType=select/cons_tres
NodeName={first} NodeAddr={one} CPUs={cores}
NodeName={second} NodeAddr={two} CPUs={cores}
PartitionName=all Nodes={first},{second} Default=YES State=UP OverSubscribe=FORCE:8
"""
        )
