"""Crafted files, and a program that loads them with little memory: ``python crafted.py FOLDER``."""

import codecs
import collections
import hashlib
import io
import os
import pickle
import random
import resource
import signal
import struct
import sys
import time
import zipfile
from pathlib import Path

import mxnet as mx
import numpy as np


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"J" + struct.pack("<i", value)


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
    of_dtype = named("numpy", "dtype") + text(dtype) + b"\x89\x88\x87R"
    shape = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in shape) + b"t"
    return made + b"(K\x01" + shape + of_dtype + b"\x89" + content + b"tb"


OPTIMIZER = pickle.dumps(mx.optimizer.SGD(), 2)[2:-1]


def states(value, optimizer=OPTIMIZER):
    """What `gluon.Trainer` would save if the state of parameter 0 were this."""
    return b"\x80\x02}K\x00" + value + b"s" + optimizer + b"\x86."


def pairs(depth):
    """(x, x) of (x, x) of ...: 2 ** depth values in a few bytes."""
    content = b"N"
    for place in range(depth):
        content += b"r" + struct.pack("<I", 5000 + place) + b"j" + struct.pack("<I", 5000 + place)
        content += b"\x86"
    return content


def many(argument, function, count=1000):
    """What a function makes of one argument, many times."""
    call = b"j\x88\x13\x00\x00j\x89\x13\x00\x00\x85R"
    kept = function + b"r\x88\x13\x00\x000" + argument + b"r\x89\x13\x00\x000"
    return kept + b"(" + call * count + b"t"


class Runs:
    """Would run a command."""

    def __init__(self, function, argument):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


RAW = bytes(mx.nd.ones((4,)).__getstate__()["handle"])
HUGE = RAW[:12] + struct.pack("<q", 2**31 - 1) + RAW[20:]


def row_sparse(rows, columns, index=0):
    """A row_sparse array with a row of numbers, of a size that it claims."""
    head = struct.pack("<Ii", 0xF993FAC9, 1)
    storage, shape = struct.pack("<iqq", 2, 1, columns), struct.pack("<iqq", 2, rows, columns)
    tail = struct.pack("<iii", 1, 0, 0) + struct.pack("<iiq", 6, 1, 1)
    return head + storage + shape + tail + bytes(4 * columns) + struct.pack("<q", index)


#: By name: the content, and what is said.
PICKLES = {
    "object array": (states(numpy_array("O8", (1,), of_bytes(b"\x10" * 8))), "which is no number"),
    "object array, list": (states(numpy_array("O8", (1,), b"(Nl")), "without content"),
    "record array": (states(numpy_array("V8", (1,), of_bytes(bytes(8)))), "which is no number"),
    "array of nothing": (
        states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R"), "without content",
    ),
    "array of no handle": (
        states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R}" + text("handle") + b"Nsb"),
        "without content",
    ),
    "huge array": (states(mxnet_array(HUGE)), "which is not 16 bytes"),
    "short array": (states(mxnet_array(RAW[:10])), "too few bytes"),
    "negative shape": (
        states(mxnet_array(RAW[:12] + struct.pack("<q", -4) + RAW[20:])), "impossible shape",
    ),
    "huge numpy array": (
        states(numpy_array("f8", (2**40,), of_bytes(b""))), "which is not 0 bytes",
    ),
    "an array of empty texts": (
        states(numpy_array("U0", (2**40,), of_bytes(b""))),
        "which is no number",
    ),
    "a dtype that NumPy would compile": (
        states(numpy_array("(2,)f4", (1,), of_bytes(bytes(8)))), "which is no number",
    ),
    "huge sparse array": (
        states(mxnet_array(row_sparse(2**33, 2))), "larger than the parameters allow",
    ),
    "sparse rows outside": (states(mxnet_array(row_sparse(3, 2, 7))), "rows that do not exist"),
    "many of one array": (
        states(mxnet_array(RAW[:12] + struct.pack("<q", 250_000) + RAW[20:32] + bytes(10**6))
               + b"r\x88\x13\x00\x000(" + b"j\x88\x13\x00\x00" * 20_000 + b"t"),
        "larger arrays than the parameters",
    ),
    "many bytes of one text": (
        states(many(text("1" * 10**5), named("builtins", "bytearray"))), "larger arrays than",
    ),
    "many sets of one list": (
        states(many(b"(" + b"".join(map(number, range(10_000))) + b"l",
                    named("builtins", "set"))), "larger arrays than",
    ),
    "many dense arrays of sparse ones": (
        states(b"(" + mxnet_array(row_sparse(2**20, 1)) * 30 + b"t"), "larger",
    ),
    "many objects of one dict": (
        states(b"(" + b"".join(text(f"a{n}") + b"N" for n in range(20_000))
               + b"dr\x88\x13\x00\x000(" + (named("mxnet.optimizer", "SGD") + b")\x81"
               + b"j\x88\x13\x00\x00b") * 200 + b"t"), "larger arrays than",
    ),
    "nested pairs": (states(pairs(100)), "too deeply, or in a cycle"),
    "nested pairs, wide": (states(pairs(50)), "too deeply, or in a cycle"),
    "nested keys": (
        b"\x80\x02}" + pairs(60) + b"K\x00s" + OPTIMIZER + b"\x86.", "neither numbers nor texts",
    ),
    "a circle": (states(b"]r\x88\x13\x00\x00j\x88\x13\x00\x00a"), "too deeply, or in a cycle"),
    "deep lists": (states(b"]" * 100_000 + b"a" * 99_999), "too deeply, or in a cycle"),
    "a memo at 2**31": (states(b"K\x05r\xff\xff\xff\x7f"), "is a number and must be None"),
    "bytes by their number": (
        states(named("builtins", "bytearray") + number(2**31 - 1) + b"\x85R"), "without content",
    ),
    "no end": (states(b"N0" * 600_000), "too long"),
    "a long number": (states(b"\x8b" + struct.pack("<I", 10**6) + b"\x01" * 10**6), "many digits"),
    "no class": (states(named("os", "system") + text("true") + b"\x85R"), "it contains os.system"),
    "a method": (states(named("mxnet.optimizer", "SGD.update")), r"it contains mxnet"),
    "built twice": (states(mxnet_array(RAW) + b"}b"), "twice"),
    "an optimizer in place of a state": (states(OPTIMIZER), "and must be"),
    "nothing on the stack": (b"\x80\x02R.", "it is damaged"),
    "a mark for a value": (b"\x80\x02(.", "it is damaged"),
}  # fmt: skip


def zip_bomb(size=2**29):
    """Format 1 with a right checksum, in which 2 MB become 512 MB."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("manifest.npy", "0.npy"):
            with archive.open(name, "w", force_zip64=True) as member:
                for _ in range(size // 2**22 // (1 if name == "0.npy" else 1000)):
                    member.write(bytes(2**22))
    return first_format(content.getvalue())


def first_format(payload):
    checksum = hashlib.sha256(payload).hexdigest().encode()
    return b"gluon_svrg states 1\n" + checksum + b"\n" + payload


def second_format(manifest, body=b""):
    rest = b"%d\n" % len(manifest) + manifest + body
    return b"gluon_svrg states 2\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def npz(**arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def own_files():
    """Of our own formats, with right checksums."""
    claims = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        claims, {"descr": "<f8", "fortran_order": False, "shape": (2**34,)}
    )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("manifest.npy", claims.getvalue())
    text_ = np.frombuffer(b"[" * 10**6, dtype=np.uint8)
    return {
        "zip bomb": (zip_bomb(), "it is compressed"),
        "a header that claims": (first_format(archive.getvalue()), "which is not 0 bytes"),
        "deep JSON, format 1": (first_format(npz(manifest=text_)), "malformed"),
        "deep JSON": (second_format(b"[" * 10**6), "malformed"),
        "long numbers": (second_format(b'{"a": ' + b"9" * 10**6 + b"}"), "too many digits"),
        "an array that claims": (
            second_format(b'{"header": {}, "parts": {}, "arrays": [["<f8", [17179869184]]]}'),
            "checksum is wrong",
        ),
        "a negative shape": (
            second_format(b'{"header": {}, "parts": {}, "arrays": [["<f8", [-8]]]}'), "malformed",
        ),
        "objects": (
            second_format(b'{"header": {}, "parts": {}, "arrays": [["|O", [1]]]}', bytes(8)),
            "no number",
        ),
        "no arrays": (second_format(b'{"header": {}, "parts": {}}'), "malformed"),
        "a list": (second_format(b"[]"), "malformed"),
    }  # fmt: skip


def main(folder, megabytes=300):
    """Load all files of a folder; more memory than that is refused by the system."""
    from saving_kit import Training

    run = Training()
    run.step(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in sorted(Path(folder).iterdir()):
        start = time.monotonic()
        try:
            run.load(path)
            found = "loaded"
        except ValueError as error:
            found = str(error)
        print(f"{path.name}\t{time.monotonic() - start:.1f}\t{found}", flush=True)


#: Operations of pickles, and numbers that are read as sizes.
PIECES = [*(bytes([code]) for code in pickle._Unpickler.dispatch), OPTIMIZER]
PIECES += [b"\xff\xff\xff\xff", struct.pack("<Q", 2**40), named("os", "system")]


def mutated(content, others, rng):
    """A pickle with a few random changes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        end = min(end, place + rng.choice([0, 1, 2, 8, 200]))
        other = rng.choice(others)
        start = rng.randrange(len(other))
        content[place:end] = rng.choice([
            b"", bytes([rng.randrange(256)]), rng.choice(PIECES), content[place:end] * 2,
            content[place:end] * 50, other[start : start + rng.choice([2, 10, 100])],
        ])  # fmt: skip
    return bytes(content)


def many_mutated(count, seed, megabytes=100, seconds=10):
    """Read changed pickles: nothing may run, take long or take more memory than that."""
    from saving_kit import Training

    from gluon_svrg.saving import pickles

    run = Training("adam")
    run.step(1)
    rng = random.Random(seed)
    bases = [content for content, _ in PICKLES.values() if len(content) < 5000]
    bases += [pickle.dumps((run.updaters[0].states, run.optimizer), n) for n in range(2, 6)] * 20
    bases.append(b"\x80\x02" + pickle.dumps(({0: Runs(os.system, "true")}, 0), 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    codecs.lookup("raw-unicode-escape")  # of Python, loaded at its first use
    events, found = [], collections.Counter()
    sys.addaudithook(lambda event, arguments: events.append(event))
    for number in range(count):
        content = bases[number] if number < len(bases) else mutated(rng.choice(bases), bases, rng)
        signal.alarm(seconds)  # ends the process
        events.clear()
        try:
            pickles.loads(content, 2**24)
            found["loaded"] += 1
        except ValueError:
            found["refused"] += 1
        assert not events, (number, events)
    print(*(f"{count} {what}" for what, count in sorted(found.items())), sep=", ")


if __name__ == "__main__":
    if sys.argv[1] == "mutated":
        many_mutated(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1])
