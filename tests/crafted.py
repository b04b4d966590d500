"""Pickles that were made to do harm; ``python crafted.py COUNT FOLDER`` loads changed ones."""

import os
import pickle
import random
import resource
import signal
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import mxnet as mx
from saving_kit import Training

from gluon_svrg.saving import pickles


class Runs:
    """Would run a command."""

    def __init__(self, function, argument):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


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


def numpy_array(dtype, shape, content):
    """An array as NumPy pickles it."""
    made = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray")
    made += b"(K\x00t" + of_bytes(b"b") + b"\x87R"
    of_dtype = named("numpy", "dtype") + text(dtype) + b"\x89\x88\x87R(K\x03" + text("<") + b"tb"
    shape = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in shape) + b"t"
    return made + b"(K\x01" + shape + of_dtype + b"\x89" + content + b"tb"


def row_sparse(rows, index):
    """A row_sparse array of a row of two numbers, of a size that it claims."""
    head = struct.pack("<Iiiqqiqq", 0xF993FAC9, 1, 2, 1, 2, 2, rows, 2)
    return head + struct.pack("<iii", 1, 0, 0) + struct.pack("<iiqffq", 6, 1, 1, 0, 0, index)


OPTIMIZER = pickle.dumps(mx.optimizer.SGD(), 4)[2:-1]
RAW = bytes(mx.nd.ones((4,)).__getstate__()["handle"])
TWICE = b"r\x88\x13\x00\x00j\x88\x13\x00\x00"  # puts a value aside, and takes it again


def states(value, optimizer=OPTIMIZER):
    """What `gluon.Trainer` would save if the state of parameter 0 were this."""
    return b"\x80\x04}K\x00" + value + b"s" + optimizer + b"\x86."


#: By name: the content, and what is said.
PICKLES = {
    "object array": (states(numpy_array("O8", (1,), of_bytes(b"\x10" * 8))), "is no number"),
    "object array, list": (states(numpy_array("f8", (1,), b"(Nl")), "without content"),
    "record array": (states(numpy_array("V8", (1,), of_bytes(bytes(8)))), "is no number"),
    "dtype to compile": (states(numpy_array("(2,)f4", (1,), of_bytes(bytes(8)))), "is no number"),
    "no handle": (
        states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R}" + text("handle") + b"Nsb"),
        "without content",
    ),
    "never filled": (states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R"), "damaged"),
    "huge array": (states(mxnet_array(RAW[:12] + b"\xff" * 6 + b"\0\0" + RAW[20:])), "not fit"),
    "short array": (states(mxnet_array(RAW[:10])), "damaged"),
    "negative shape": (states(mxnet_array(RAW[:12] + b"\xff" * 8 + RAW[20:])), "does not fit"),
    "many sizes": (states(mxnet_array(RAW[:8] + b"\xff\xff\xff\x7f" + RAW[12:])), "damaged"),
    "huge numpy array": (states(numpy_array("f8", (2**40,), of_bytes(b""))), "does not fit"),
    "huge sparse array": (states(mxnet_array(row_sparse(2**33, 0))), "larger arrays than"),
    "sparse rows outside": (states(mxnet_array(row_sparse(3, 7))), "damaged"),
    "one array many times": (
        states(b"(" + mxnet_array(RAW[:12] + struct.pack("<q", 10**6) + RAW[20:32] + bytes(4 * 10**6))
               + TWICE[:5] + TWICE[5:] * 20_000 + b"t"), "larger arrays than",
    ),
    "nested pairs": (states(b"N" + (TWICE + b"\x86") * 100), "too deeply, or in a cycle"),
    "nested pairs, wide": (states(b"N" + (TWICE + b"\x86") * 50), "too deeply, or in a cycle"),
    "nested keys": (b"\x80\x04}N" + (TWICE + b"\x86") * 60 + b"K\x00s.", "key of type tuple"),
    "deep keys": (b"\x80\x04}N" + b"\x85" * 200_000 + b"K\x00s.", "key of type tuple"),
    "a nested function": (states(b"N" + (TWICE + b"\x86") * 60 + b")R"), "key of type tuple"),
    "a nested name": (
        b"\x80\x04N" + (TWICE + b"\x86") * 60 + text("a") + b"\x93.", "expected str instance",
    ),
    "equal hashes": (states(b"]" + b"\x8a\x09" + bytes(8) + b"\x01a"), "too many digits"),
    "a circle": (states(b"]" + TWICE + b"a"), "too deeply, or in a cycle"),
    "deep lists": (states(b"]" * 100_000 + b"a" * 99_999), "too deeply, or in a cycle"),
    "no end": (states(b"Nq\x00" * 600_000), "too long"),
    "a long number": (states(b"\x8b" + struct.pack("<I", 10**6) + b"\x01" * 10**6), "many digits"),
    "long digits": (states(b"I" + b"1" * 10**6 + b"\n"), "damaged"),
    "a class": (states(named("os", "system") + text("true") + b"\x85R"), "it contains os.system"),
    "a method": (states(named("mxnet.optimizer", "SGD.update")), "it contains mxnet"),
    "an extension": (states(b"\x82\xf0" + text("true") + b"\x85R"), "the operation EXT1"),
    "an instance": (states(b"(" + text("true") + b"ios\nsystem\n"), "the operation INST"),
    "a persistent id": (states(text("true") + b"Q"), "the operation BINPERSID"),
    "a dict is built": (states(b"}}" + text("__class__") + b"Nsb"), "damaged"),
    "an optimizer is a state": (states(OPTIMIZER), "and must be"),
    "a state is a number": (states(b"K\x05"), "is a number and must be None"),
    "no optimizer": (states(b"N", mxnet_array(RAW)), "not of the states of a gluon.Trainer"),
    "a scheduler that never ends": (
        states(b"N", pickle.dumps(mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(1)))
               [2:-1].replace(b"\x94\x8c\x05count\x94K\x00", b"\x94\x8c\x05count\x94J\x00\x00\x00\x80")),
        "would count from -2147483648 by 1 for too long|lr_scheduler was FactorScheduler",
    ),
    "nothing on the stack": (b"\x80\x02R.", "damaged"),
    "a mark for a value": (b"\x80\x02(.", "damaged"),
}  # fmt: skip
PIECES = [*(code.code.encode("latin-1") for code in pickles.pickletools.opcodes), OPTIMIZER]
PIECES += [b"\xff\xff\xff\xff", struct.pack("<Q", 2**40), named("os", "system")]


def changed(content, others, rng):
    """A pickle with a few random changes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        end = min(end, place + rng.choice([0, 1, 2, 8, 200]))
        other = rng.choice(others)
        start = rng.randrange(len(other))
        content[place:end] = rng.choice([
            b"", bytes([rng.randrange(256)]), rng.choice(PIECES), content[place:end] * 50,
            other[start : start + rng.choice([2, 10, 100])],
        ])  # fmt: skip
    return bytes(content)


def main(count, path, megabytes=300, seconds=5):
    """Load changed pickles: nothing may run, take long, or take more memory than that."""

    def make():
        return Training("adam", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(1)})

    run = make()
    run.step(1)
    rng = random.Random(1)
    good = pickle.dumps((run.updaters[0].states, run.optimizer))
    contents = [content for content, _ in PICKLES.values()]
    short = [content for content in contents if len(content) < 5000]
    contents += [good, *(changed(rng.choice([good, *short]), [good, *short], rng)
                         for _ in range(count - len(contents) - 1))]  # fmt: skip
    pickles.loads(good, 0)  # what Python loads at the first use
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    events, found, slowest = [], Counter(), 0.0
    sys.addaudithook(lambda event, arguments: events.append(event))
    for number, content in enumerate(contents):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process; ends it
        begin, outcome = time.process_time(), "loaded"
        events.clear()
        try:
            pickles.loads(content, 0)
        except ValueError:
            outcome = "refused"
        assert not events, (number, events)
        Path(path).write_bytes(content)
        try:
            run.load(path)
            run.step(1)
        except ValueError as error:
            assert "Nothing was changed" in str(error)
        except Exception:  # a wrong number fails in the next step
            run = make()
        slowest = max(slowest, time.process_time() - begin)
        found[outcome] += 1
    print(f"loaded {found['loaded']}, refused {found['refused']}, slowest {slowest:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), os.path.join(sys.argv[2], "states"))
