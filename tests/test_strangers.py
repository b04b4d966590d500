"""Who may take part in `gluon-svrg join`: its processes, after a proof, and nobody else."""

import contextlib
import json
import os
import pickle
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from jobs import GLUON_SVRG, assert_nothing_left, finish, start, wait_for

from gluon_svrg.commands import door, proof, rendezvous, roles
from gluon_svrg.commands.signals import Interruptible

pytestmark = pytest.mark.xdist_group("clusters")
SECRET = "a secret of at least 16 bytes, \u043d\u0435 ASCII"
KEY = rendezvous.Meeting([], 0).key(SECRET.encode())
OPEN = rendezvous.Meeting([], 0).key(b"")  # without a secret, on this machine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank, folder, *options, size=2, script="touch ran; exit 7", files=None, **variables):
    """Start a process of a job; its worker leaves a file, and then fails, so that the job ends."""
    words = [*GLUON_SVRG, "join", "--rank", rank, "--size", size, *options]
    words += ["--", "sh", "-c", script]
    if files:
        words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
    return start(words, folder, **variables)


def with_secret(folder, port):
    path = Path(folder, "token")
    path.write_text(SECRET)
    return ["--scheduler", f"localhost:{port}", "--token-file", path]


def wait_for_port(port, deadline=60):
    """Wait until something listens; the addresses on which it does."""
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        found = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        addresses = [at.split(":")[0] for at in found if int(at.split(":")[1], 16) == port]
        if addresses:
            return [socket.inet_ntoa(struct.pack("=I", int(at, 16))) for at in addresses]
        time.sleep(0.02)
    raise AssertionError("nobody listens")


def ran(folder):
    return Path(folder, "ran").exists()


# --- a listener that is not rank 0 ---------------------------------------------------------------


def obey_me(folder):
    """What a false rank 0 sends: code of its own for a process of the other one."""
    Path(folder, "sitecustomize.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    variables = {"PYTHONPATH": str(folder), "DMLC_ROLE": "worker"}
    orders = [
        {"prepare": {}},
        {"start": [["server 0", variables], ["worker 0", variables]], "run": 1},
    ]
    return [json.dumps(order).encode() + b"\n" for order in orders]


def listen_falsely(listener, first, orders):
    """Talk to each process that connects."""

    def talk(connection):
        with contextlib.suppress(OSError), connection:
            connection.settimeout(3)
            connection.sendall(first)
            connection.recv(10000)
            connection.sendall(b"".join(orders))
            while connection.recv(10000):
                pass

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


@pytest.mark.parametrize("first", [b"", b"0" * 64 + b"\n"], ids=["silent", "challenge"])
@pytest.mark.parametrize("how", ["--scheduler", "file"])
def test_a_listener_that_is_not_rank_0(how, first, tmp_path, marker):
    """Nothing that it sends is used."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        orders = [b'{"refusal": null}\n', *obey_me(tmp_path)]
        listen_falsely(listener, first, orders)
        if how == "file":  # of an earlier job, whose port has another process now
            meeting = rendezvous.Meeting(["127.0.0.1"], port, "t" * 64)
            meeting.write(tmp_path / ".gluon-svrg-job")
        options = [] if how == "file" else with_secret(tmp_path, port)
        process = join(1, tmp_path, "--wait", 3, *options)
        output = finish(process)
    assert process.returncode == 2, output
    assert re.fullmatch(
        r"gluon-svrg join: error: rank 0 did not answer within 3 s: use a longer --wait; what "
        r"listens on 127.0.0.1:\d+ did not prove to be rank 0 of this job",
        output.splitlines()[-1],
    ), output
    assert not ran(tmp_path)
    assert_nothing_left(marker)


@pytest.mark.parametrize("whose", ["open to all", "another user's", "a link", "a pipe"])
def test_a_file_that_others_can_write(whose, tmp_path, marker):
    path = tmp_path / ".gluon-svrg-job"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = rendezvous.Meeting(["127.0.0.1"], listener.getsockname()[1], "t" * 64)
        key = meeting.key(b"")
        if whose == "a pipe":
            os.mkfifo(path, 0o600)
        else:
            meeting.write(path)
        if whose == "open to all":
            path.chmod(0o666)
        elif whose == "a link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif whose == "another user's":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(path, 12345, -1)
        director = Director(listener, key, [["worker 0", {"DMLC_ROLE": "worker"}]])
        process = join(1, tmp_path, "--wait", 2)
        output = finish(process)
    assert process.returncode == 2, output
    reason = "Too many levels of symbolic links" if whose == "a link" else "no file that only this"
    assert reason in output.splitlines()[-1]
    assert not ran(tmp_path)
    assert not director.guests
    assert_nothing_left(marker)


# --- what rank 0 may send ------------------------------------------------------------------------


class Director:
    """A rank 0 that knows the secret, and sends what it likes."""

    def __init__(self, listener, key, order):
        self.order, self.guests = order, []
        listener.setblocking(False)
        self.thread = threading.Thread(target=self._direct, args=(listener, key), daemon=True)
        self.thread.start()

    def _direct(self, listener, key):
        with contextlib.suppress(Exception):
            self.guests = door.receive(listener, 2, key, 30, Interruptible())
            (guest,) = self.guests
            channel = rendezvous.channel(guest.socket, guest.session, is_root=True)
            channel.open(lambda message: None)
            channel.send(prepare={"script": ["touch", "ran"], "folder": "/", "variables": {}})
            channel.send(start=self.order, run=1)
            channel.send(close=0)
            channel.close()


NEEDED = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NODE_HOST": "127.0.0.1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "HOROVOD_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_IFACE": "eth0.100",
}
REFUSED = [
    ["worker 0", {"PYTHONPATH": "/tmp"}],
    ["worker 0", {"LD_PRELOAD": "/tmp/a.so"}],
    ["worker 0", {"DMLC_PS_ROOT_URI": "evil.example"}],
    ["worker 0", {"DMLC_PS_ROOT_PORT": "9000\n"}],
    ["worker 0", {"DMLC_PS_ROOT_PORT": 9000}],
    ["worker 0", {"DMLC_INTERFACE": "eth0"}],
    ["worker 0", {"DMLC_ROLE": "joint"}],
    ["worker 0", {"HOROVOD_GLOO_IFACE": "$(id)"}],
    ["worker 0", {"HOROVOD_TIMELINE": "/etc/passwd"}],
    ["worker 0", {"HOROVOD_SIZE": "٣"}],
    ["worker 0", ["DMLC_ROLE"]],
    ["../worker 0", {}],
    ["sh", {}],
    [0, {}],
    ["worker 0", {}, ["sh"]],
    "worker 0",
    None,
]


def test_what_rank_0_may_not_send():
    assert roles.checked([["worker 0", NEEDED]]) == [("worker 0", NEEDED)]
    for role in REFUSED:
        with pytest.raises((ValueError, TypeError)):
            pytest.fail(str(roles.checked([["scheduler", {}], role])))


def test_all_that_a_job_needs_may_be_sent():
    sent = roles.parameter_servers([["scheduler", "server 0"], ["worker 0"]], ["10.0.0.1"] * 2, 80)
    for machine in sent:
        assert roles.checked(json.loads(json.dumps(machine))) == machine


def test_a_rank_0_that_sends_variables(tmp_path, marker):
    """The others end, and have started nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = with_secret(tmp_path, listener.getsockname()[1])
        director = Director(listener, KEY, [["worker 0", {"PYTHONPATH": str(tmp_path)}]])
        process = join(1, tmp_path, *options)
        output = finish(process)
    assert len(director.guests) == 1
    assert process.returncode == 1
    line = "rank 0 sent what no job needs (the variable PYTHONPATH="
    assert line in output.splitlines()[-1], output
    assert not ran(tmp_path)
    assert_nothing_left(marker)


# --- clients -------------------------------------------------------------------------------------


def hello(key=None, **changes):
    """The first message of a rank 1 that knows a key; as in 0.2.0 without one."""

    def say(challenge):
        told = {"rank": 1, "size": 2, "host": "x", "nonce": "0", "token": "", **changes}
        said = json.dumps(told).encode()
        return said if key is None else proof.proof(key, b"guest", challenge, said) + b" " + said

    return say


def signed(said):
    """What only a process that knows the key could say, but for a job that has none."""
    return lambda challenge: proof.proof(OPEN, b"guest", challenge, said) + b" " + said


HOSTILE = {
    "an empty token": hello(),
    "another secret": hello(b"another secret"),
    "the challenge itself": lambda challenge: challenge + b" " + challenge,
    "no text": lambda challenge: bytes(range(128, 256)) + b" {}",
    "not ASCII": lambda challenge: "ключ {}".encode(),
    "nested": lambda challenge: b"[" * 1900,
    "enormous": lambda challenge: b"[" * 10_000_000,
    "a number": lambda challenge: b'{"rank": 1e999, "size": 2, "host": "x"}',
    "HTTP": lambda challenge: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a pickle": lambda challenge: pickle.dumps({"rank": 1}),
    "two lines": lambda challenge: b"a b\nc d",
    "nothing": lambda challenge: b"",
}
HOSTILE_WITHOUT_SECRET = {
    "nested": signed(b"[" * 1500),
    "a large number": signed(b'{"rank": 1e999, "size": 2, "host": "x"}'),
    "many digits": signed(b'{"rank": 1' + b"0" * 1500 + b', "size": 2, "host": "x"}'),
    "a fraction": signed(b'{"rank": 1.0, "size": 2, "host": "x"}'),
    "rank 0": hello(OPEN, rank=0),
    "a list": signed(b"[1, 2]"),
    "no text": signed(b"\xff\xfe{}"),
}


def knock(port, say):
    """Connect, say something, and get the answer; None for none."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
        challenge = client.recv(65)[:-1]
        client.sendall(say(challenge) + b"\n")
        return client.recv(1000)
    return b""


def let_in(port, folder, first, options=(), deadline=40):
    """The second process gets in: the job ends as its workers do."""
    since = time.monotonic()
    second = join(1, folder, *options)
    outputs = [finish(process) for process in (first, second)]
    assert [first.returncode, second.returncode] == [7, 7], outputs
    assert time.monotonic() - since < deadline
    assert "Traceback" not in outputs[0]
    return outputs[0]


def test_clients_without_the_secret(tmp_path, marker):
    port = free_port()
    options = with_secret(tmp_path, port)
    first = join(0, tmp_path, *options)
    wait_for_port(port)
    for what, say in HOSTILE.items():
        assert knock(port, say) in (b"", None), what
    output = let_in(port, tmp_path, first, options)
    assert len(re.findall("did not prove to belong to this job", output)) == 1  # in a minute
    assert_nothing_left(marker)


def test_nobody_can_repeat_what_was_said(tmp_path):
    """Not even to be let in, by the proof of a process that was."""
    with door.listen(0, "127.0.0.1") as listener:
        first = Director(listener, KEY, [])
        address = listener.getsockname()
        with socket.create_connection(address, 10) as one:
            said = hello(KEY)(one.recv(65)[:-1])
            with socket.create_connection(address, 10) as other:
                other.recv(65)
                other.sendall(said + b"\n")
                assert other.recv(1000) == b""  # it is the answer to another challenge
            one.sendall(said + b"\n")
            assert b'{"refusal": null}' in one.recv(1000)
            first.thread.join()


def test_nobody_can_repeat_or_change_a_message():
    seal, other = proof.Seal(b"key"), proof.Seal(b"key")
    messages = [seal.close(b"one"), seal.close(b"two")]
    assert other.open(messages[0]) == b"one"
    with pytest.raises(ValueError, match="without proof"):
        other.open(messages[0])
    with pytest.raises(ValueError, match="without proof"):
        proof.Seal(b"another key").open(messages[0])
    with pytest.raises(ValueError, match="without proof"):
        proof.Seal(b"key").open(messages[1])


def test_hostile_clients_where_there_is_no_secret(tmp_path, marker):
    port = free_port()
    options = ["--scheduler", f"localhost:{port}"]
    first = join(0, tmp_path, *options)
    assert wait_for_port(port) == ["127.0.0.1"]
    for what, say in HOSTILE_WITHOUT_SECRET.items():
        answer = knock(port, say)
        assert not answer or b"there is already a rank" in answer, what
    let_in(port, tmp_path, first, options)
    assert_nothing_left(marker)


def trickle(port, stop):
    """A peer that sends a byte a second."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
        while not stop.wait(1):
            client.sendall(b"[")


def test_slow_clients(tmp_path, marker):
    """They are sent away after five seconds, and nobody waits for them."""
    port, stop = free_port(), threading.Event()
    options = with_secret(tmp_path, port)
    first = join(0, tmp_path, *options)
    wait_for_port(port)
    slow = [threading.Thread(target=trickle, args=(port, stop)) for _ in range(5)]
    silent = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(5)]
    for thread in slow:
        thread.start()
    since = time.monotonic()
    for client in silent:
        client.settimeout(30)
        assert len(client.recv(1000)) == 65
        assert client.recv(1000) == b""
        client.close()
    assert time.monotonic() - since < 10
    output = let_in(port, tmp_path, first, options)
    stop.set()
    for thread in slow:
        thread.join()
    assert "did not prove to belong to this job" in output
    assert_nothing_left(marker)


def test_5000_idle_connections(tmp_path, marker):
    """Rank 0 may open 256 files, and the others still get in."""
    port = free_port()
    options = with_secret(tmp_path, port)
    first = join(0, tmp_path, *options, files=256)
    wait_for_port(port)
    idle = [socket.socket() for _ in range(5000)]
    for client in idle:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
    output = let_in(port, tmp_path, first, options)
    for client in idle:
        client.close()
    assert "did not prove to belong to this job" in output
    assert_nothing_left(marker)


@pytest.mark.jobs
def test_1000_hostile_connections(tmp_path, marker, record_property):
    port = free_port()
    options = with_secret(tmp_path, port)
    first = join(0, tmp_path, *options, files=256)
    wait_for_port(port)
    answered = 0
    for number in range(1000):
        say = list(HOSTILE.values())[number % len(HOSTILE)]
        answered += bool(knock(port, say))
    let_in(port, tmp_path, first, options)
    message = f"1000 hostile connections: {answered} were answered, and the real rank got in"
    record_property("counted", message)
    assert answered == 0
    assert_nothing_left(marker)


# --- which secret --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "options, token, message",
    [
        (["--scheduler", "10.97.0.1:9"], None, "10.97.0.1:9 needs a secret that all processes"),
        (["--scheduler", "0.0.0.0:9"], None, "0.0.0.0:9 needs a secret that all processes"),
        (["--scheduler", "no-such.invalid:9"], None, "no-such.invalid:9 needs a secret"),
        (["--scheduler", "localhost:9"], "", "the token of GLUON_SVRG_TOKEN is too short"),
        (["--scheduler", "localhost:9"], "guess me", "the token of GLUON_SVRG_TOKEN is too short"),
        (["--token-file", "no/where"], None, "cannot read --token-file no/where: No such file"),
        (["--token-file", "/dev/null"], None, "the token of /dev/null is too short"),
        (["--no-authentication"], None, "--no-authentication is for --scheduler without a token"),
        (
            ["--no-authentication", "--scheduler", "localhost:9"],
            SECRET,
            "--no-authentication is for --scheduler without a token",
        ),
    ],
)
def test_wrong_secrets(options, token, message, rank, tmp_path, marker):
    variables = {} if token is None else {"GLUON_SVRG_TOKEN": token}
    process = join(rank, tmp_path, *options, **variables)
    output = finish(process)
    assert process.returncode == 2
    assert message in output.splitlines()[-1], output
    assert "Traceback" not in output


def test_a_secret_in_a_variable(tmp_path, marker):
    """Its value reaches no worker: programs print their variables."""
    port = free_port()
    options = ["--scheduler", f"localhost:{port}"]
    script = 'echo "the token is <$GLUON_SVRG_TOKEN>"; exit 7'
    processes = [
        join(rank, tmp_path, *options, script=script, GLUON_SVRG_TOKEN=SECRET) for rank in (0, 1)
    ]
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [7, 7], outputs
    assert "the token is <>" in outputs[0] + outputs[1]
    assert_nothing_left(marker)


def test_no_authentication(tmp_path, marker):
    """It says what it means."""
    port = free_port()
    options = ["--scheduler", f"0.0.0.0:{port}", "--no-authentication"]
    first = join(0, tmp_path, *options)
    assert wait_for_port(port) == ["0.0.0.0"]
    output = let_in(port, tmp_path, first, options)
    (line,) = re.findall("^gluon-svrg join: --no-auth.*$", output, re.M)
    assert "can take part in this job and choose what its workers connect to" in line


def test_a_secret_that_differs(tmp_path, marker):
    """Both sides say so; nothing starts."""
    port = free_port()
    first = join(0, tmp_path, *with_secret(tmp_path, port), "--wait", 8)
    wait_for_port(port)
    options = ["--scheduler", f"localhost:{port}", "--wait", 4]
    second = join(1, tmp_path, *options, GLUON_SVRG_TOKEN=SECRET.upper())
    outputs = [finish(process) for process in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2]
    assert "did not prove to belong to this job" in outputs[0]
    assert "did not prove to be rank 0 of this job" in outputs[1]
    assert not ran(tmp_path)


def test_the_file_is_of_use_to_its_owner_only(tmp_path, marker):
    """With a secret besides, reading the file is not enough."""
    first = join(0, tmp_path, GLUON_SVRG_TOKEN=SECRET)
    path = tmp_path / ".gluon-svrg-job"
    wait_for(path, first)
    assert path.stat().st_mode & 0o777 == 0o600
    meeting = rendezvous.Meeting.read(path)
    assert not knock(meeting.port, hello(meeting.key(b"")))
    second = join(1, tmp_path, GLUON_SVRG_TOKEN=SECRET)
    outputs = [finish(process) for process in (first, second)]
    assert [first.returncode, second.returncode] == [7, 7], outputs
    assert not path.exists()


def test_a_job_on_one_machine_listens_there_only(tmp_path, marker):
    """Launchers that say that all processes run here: no other machine can reach the job."""
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    words = [*GLUON_SVRG, "join", "--", "sh", "-c", "exit 7"]
    first = start(words, tmp_path, OMPI_COMM_WORLD_RANK="0", **variables)
    path = tmp_path / ".gluon-svrg-mpi-job"
    wait_for(path, first)
    meeting = rendezvous.Meeting.read(path)
    assert meeting.addresses == wait_for_port(meeting.port) == ["127.0.0.1"]
    second = start(words, tmp_path, OMPI_COMM_WORLD_RANK="1", **variables)
    outputs = [finish(process) for process in (first, second)]
    assert [first.returncode, second.returncode] == [7, 7], outputs
    assert_nothing_left(marker)
