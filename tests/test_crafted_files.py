"""Pickles of `gluon.Trainer`, and crafted ones: nothing runs, nothing bursts, nothing hangs."""

import contextlib
import copyreg
import os
import pickle
import pickletools
import random
import re
import resource
import signal
import struct
import sys
import time
from pathlib import Path

import mxnet as mx
import pytest
from jobs import run
from saving_kit import Training, refused

from gluon_svrg.saving import pickles


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def of_bytes(content):
    return b"B" + struct.pack("<I", len(content)) + content


def named(module, name):
    return b"c%s\n%s\n" % (module.encode(), name.encode())


def mxnet_array(raw):
    """An array as MXNet pickles it, with whatever bytes."""
    state = b"}" + text("handle") + named("builtins", "bytearray") + of_bytes(raw) + b"\x85Rs"
    return named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R" + state + b"b"


def numpy_array(dtype, size, content):
    """An array as NumPy pickles it."""
    made = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b")N\x87R"
    of_dtype = named("numpy", "dtype") + text(dtype) + b"\x85R(K\x03" + text("<") + b"tb"
    shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85"
    return made + b"(K\x01" + shape + of_dtype + b"\x89" + content + b"tb"


def row_sparse(rows, index):
    """A row_sparse array of a row of two numbers, of a size that it claims."""
    head = struct.pack("<Iiiqqiqq", 0xF993FAC9, 1, 2, 1, 2, 2, rows, 2)
    return head + struct.pack("<iii", 1, 0, 0) + struct.pack("<iiqffq", 6, 1, 1, 0, 0, index)


OPTIMIZER = pickle.dumps(mx.optimizer.SGD(), 4)[2:-1]
RAW = bytes(mx.nd.ones((4,)).__getstate__()["handle"])
LARGE = RAW[:12] + struct.pack("<q", 10**6) + RAW[20:32] + bytes(4 * 10**6)
PUT, GET = b"r\x88\x13\x00\x00", b"j\x88\x13\x00\x00"  # a value aside, and take it again
PAIRS = b"N" + (PUT + GET + b"\x86") * 60  # 2 ** 60 values
FACTOR = pickle.dumps(mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(1)))[2:-1]
FACTOR = FACTOR.replace(b"count\x94K\x00", b"count\x94J\x00\x00\x00\x80")


def states(value, optimizer=OPTIMIZER):
    """What `gluon.Trainer` would save if the state of parameter 0 were this."""
    return b"\x80\x04}K\x00" + value + b"s" + optimizer + b"\x86."


#: The content, and what is said.
PICKLES = [
    (states(numpy_array("O8", 1, of_bytes(b"\x10" * 8))), "of a dtype that is no number"),
    (states(numpy_array("f8", 1, b"(Nl")), "without content"),
    (states(numpy_array("f8", 2**40, of_bytes(b""))), "its shape does not fit"),
    (states(mxnet_array(RAW[:12] + b"\xff" * 6 + b"\0\0" + RAW[20:])), "its shape does not fit"),
    (states(mxnet_array(RAW[:8] + b"\xff\xff\xff\x7f" + RAW[12:])), "damaged"),
    (states(mxnet_array(row_sparse(2**33, 0))), "larger arrays than the parameters"),
    (states(mxnet_array(row_sparse(3, 7))), "damaged"),
    (states(b"(" + mxnet_array(LARGE) + PUT + GET * 20_000 + b"t"), "larger arrays than the param"),
    (states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R"), "damaged"),
    (states(PAIRS), "nested too deeply, or in a cycle"),
    (states(b"]" + PUT + GET + b"a"), "nested too deeply, or in a cycle"),
    (b"\x80\x04}" + PAIRS + b"K\x00s.", "key of type tuple"),
    (b"\x80\x04}N" + b"\x85" * 200_000 + b"K\x00s.", "key of type tuple"),
    (b"\x80\x04N" + PAIRS + text("a") + b"\x93.", "expected str instance, tuple found"),
    (states(b"]\x8a\x09" + bytes(8) + b"\x01a"), "too many digits"),  # of equal hashes
    (states(b"\x8b" + struct.pack("<I", 10**6) + b"\x01" * 10**6), "too many digits"),
    (states(b"I" + b"1" * 10**6 + b"\n"), "damaged"),
    (states(b"Nq\x00" * 600_000), "too long"),
    (states(named("os", "system") + text("true") + b"\x85R"), "it contains os.system"),
    (states(text("os") + text("system") + b"\x93" + text("true") + b"\x85R"), "contains os.system"),
    (states(named("builtins", "eval") + text("1") + b"\x85R"), "builtins.eval.*could run code"),
    (states(named("mxnet.optimizer", "SGD.update")), "it contains mxnet.optimizer.SGD.update"),
    (states(text("true") + b"Q"), "the operation BINPERSID"),
    (states(b"}}" + text("__class__") + b"Nsb"), "damaged"),
    (states(OPTIMIZER), "and must be"),
    (states(b"N", mxnet_array(RAW)), "not of the states of a gluon.Trainer"),
    (states(b"N", FACTOR), "would count from -2147483648 by 1 for too long|was FactorScheduler"),
    (b"\x80\x02R.", "damaged"),
]
PIECES = [*(code.code.encode("latin-1") for code in pickletools.opcodes), OPTIMIZER]
PIECES += [b"\xff\xff\xff\xff", struct.pack("<Q", 2**40), named("os", "system")]


def changed(content, others, rng):
    """A pickle with a random change or two."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 2)):
        place, other = rng.randrange(len(content) + 1), rng.choice(others)
        end, start = place + rng.choice([0, 1, 1, 2, 8, 200]), rng.randrange(len(other))
        content[place:end] = rng.choice([
            b"", bytes([rng.randrange(256)]), rng.choice(PIECES), content[place:end] * 50,
            other[start : start + rng.choice([2, 10, 100])],
        ])  # fmt: skip
    return bytes(content)


def test_crafted_pickles(tmp_path):
    run = Training()
    for content, message in PICKLES:
        refused(run, content, tmp_path / "states", message)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_pickles(count, tmp_path, record_property):
    """Python reports whatever a program opens, imports, starts or compiles: there is nothing."""
    words = [sys.executable, __file__, count, tmp_path / "states"]
    status, output = run(words, deadline=600)
    assert status == 0, (status, output[-2000:])
    counted = re.search(r"loaded (\d+) of .*", output)
    record_property("counted", counted[0])
    assert 3 < int(counted[1]) < count / 2


def test_codes_of_extensions_are_refused(tmp_path):
    """Python keeps what a code stands for, and would not ask an unpickler again."""
    copyreg.add_extension("posix", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        harm = b"\x82\xf0" + text(f"touch {tmp_path / 'owned'}") + b"\x85R"
        refused(Training(), states(harm), tmp_path / "states", "operation EXT1")
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "owned").exists()


def load_changed(count, path, megabytes=300, seconds=5):
    """Load changed pickles: nothing may run, take long, or take more memory than that."""
    scheduler = mx.lr_scheduler.FactorScheduler(1)
    run, rng = Training("adam", {"lr_scheduler": scheduler}), random.Random(1)
    run.step(1)
    good = pickle.dumps((run.states[0], run.optimizer))
    contents = [good, *(content for content, _ in PICKLES)]
    short = [content for content in contents if len(content) < 5000]
    while len(contents) < count:
        contents.append(changed(rng.choice([good, rng.choice(short)]), short, rng))
    pickles.loads(good, 0)  # what Python loads at the first use
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)
    events, loaded, slowest = [], 0, 0.0
    sys.addaudithook(lambda event, arguments: events.append(event))
    for number, content in enumerate(contents):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process; ends it
        begin = time.process_time()
        events.clear()
        with contextlib.suppress(ValueError):
            pickles.loads(content, 0)
            loaded += 1
        assert not events, (number, events)
        Path(path).write_bytes(content)
        try:
            run.load(path)
            run.step(1)
        except ValueError as error:
            assert "Nothing was changed" in str(error)
        except Exception:  # a wrong number fails in the next step
            run.use(run.net.collect_params(), "adam", {"lr_scheduler": scheduler})
        slowest = max(slowest, time.process_time() - begin)
    print(f"loaded {loaded} of {len(contents)}, slowest {slowest:.2f} s")


if __name__ == "__main__":
    load_changed(int(sys.argv[1]), sys.argv[2])
