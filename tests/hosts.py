"""Two machines for tests: namespaces with a link between them, a name and an sshd each."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SSHD = "/usr/sbin/sshd"


def missing():
    """Why there can be no such machines here, or None."""
    for program in ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"needs {program}"
    if os.geteuid():
        return "needs root, to make network namespaces"
    name = f"svrg-try-{os.getpid()}"
    script = (
        f"ip netns add {name} && "
        f"nsenter --net=/run/netns/{name} unshare --uts --mount "
        "sh -c 'hostname node-a && mount --bind /etc/hosts /etc/hosts'"
    )
    made = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return f"needs namespaces: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """Two machines, node-a and node-b, with the addresses 10.97.0.1 and 10.97.0.2."""

    hostnames = ("node-a", "node-b")
    addresses = ("10.97.0.1", "10.97.0.2")

    def __init__(self, folder):
        self.folder = Path(folder)
        self.names = [f"svrg-{os.getpid()}-{letter}" for letter in "ab"]
        self._links = [f"sv{os.getpid()}{letter}" for letter in "ab"]
        self._sshds = []

    def __enter__(self):
        for name in self.names:
            _run("ip", "netns", "add", name)
        one, two = self._links
        _run("ip", "link", "add", one, "type", "veth", "peer", "name", two)
        for name, link, address in zip(self.names, self._links, self.addresses):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._start_sshds()
        return self

    def __exit__(self, *error):
        for sshd in self._sshds:
            os.killpg(sshd.pid, signal.SIGKILL)
            sshd.wait()
        for name in self.names:
            for process in _run("ip", "netns", "pids", name).split():
                os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "delete", name)

    def inside(self, number, folder="/"):
        """The words before a command that is to run on a machine, in a folder."""
        process = self._sshds[number].pid
        return ["nsenter", f"--target={process}", "--net", "--uts", "--mount", f"--wd={folder}"]

    def processes(self):
        """The words of all processes on both machines, by their ids."""
        found = {}
        for name in self.names:
            for process in _run("ip", "netns", "pids", name).split():
                with suppress(OSError):
                    words = Path(f"/proc/{process}/cmdline").read_bytes().decode()
                    found[int(process)] = words.replace("\0", " ").strip()
        return found

    def link(self, state):
        """Take the link between the machines down, or up."""
        _run("ip", "-n", self.names[1], "link", "set", self._links[1], state)

    @property
    def ssh(self):
        """The command that reaches them."""
        return (
            f"ssh -F none -p 2222 -i {self.folder}/key -o StrictHostKeyChecking=no "
            "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )

    def _start_sshds(self):
        for name in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "sshd_config").write_text(
            f"Port 2222\nHostKey {self.folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nUsePAM no\n"
        )
        names = zip(self.addresses, self.hostnames)
        (self.folder / "names").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for at, name in names)
        )
        os.makedirs("/run/sshd", exist_ok=True)
        for number in range(2):
            name = self.hostnames[number]
            script = (
                f"hostname {name} && mount --bind {self.folder}/names /etc/hosts && "
                f"exec {SSHD} -D -f {self.folder}/sshd_config"
            )
            command = [
                *("nsenter", f"--net=/run/netns/{self.names[number]}"),
                *("unshare", "--uts", "--mount", "sh", "-c", script),
            ]
            variables = {k: v for k, v in os.environ.items() if k != "MARKER"}
            self._sshds.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + 20
        for name in self.hostnames:
            while True:
                command = [*self.inside(0), *self.ssh.split(), name, "hostname"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.stdout == f"{name}\n":
                    break
                assert time.monotonic() < deadline, "an sshd does not answer"
                time.sleep(0.2)


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
