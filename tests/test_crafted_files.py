"""Pickles that were crafted to run code, or to crash MXNet's own reader, are refused."""

import copyreg
import os
import pickle
import struct

import mxnet as mx
from saving_kit import Training, refused


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


def with_attribute(name):
    optimizer = mx.optimizer.SGD()
    vars(optimizer)[name] = 1
    return pickle.dumps(optimizer, 4)[2:-1]


OPTIMIZER = pickle.dumps(mx.optimizer.SGD(), 4)[2:-1]
RAW = bytes(mx.nd.ones((4,)).__getstate__()["handle"])


def states(value, optimizer=OPTIMIZER):
    """What `gluon.Trainer` would save if the state of parameter 0 were this."""
    return b"\x80\x04}K\x00" + value + b"s" + optimizer + b"\x86."


#: The content, and what is said.
PICKLES = [
    (states(numpy_array("O8", 1, of_bytes(b"\x10" * 8))), "of a dtype that is no number"),
    (states(numpy_array("f8", 1, b"(Nl")), "without content"),
    (states(numpy_array("f8", 10**8, b"N")), "without content"),  # NumPy would take new memory
    (states(numpy_array("f8", 2**40, of_bytes(b""))), "damaged"),
    (states(mxnet_array(RAW[:12] + b"\xff" * 6 + b"\0\0" + RAW[20:])), "damaged"),
    (states(mxnet_array(RAW[:8] + b"\xff\xff\xff\x7f" + RAW[12:])), "damaged"),
    (states(mxnet_array(row_sparse(3, 7))), "damaged"),
    (states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R"), "damaged"),
    (states(b"]q\xffh\xffa"), "damaged"),  # contains itself
    (states(b"Pos.system\n"), "persistent"),
    (states(named("os", "system") + text("true") + b"\x85R"), "it contains os.system"),
    (states(text("os") + text("system") + b"\x93" + text("true") + b"\x85R"), "contains os.system"),
    (states(named("builtins", "eval") + text("1") + b"\x85R"), "builtins.eval.*could run code"),
    (states(named("mxnet.optimizer", "SGD.update")), "it contains mxnet.optimizer.SGD.update"),
    (states(b"}}" + text("__class__") + b"Nsb"), "damaged"),
    (states(OPTIMIZER), "and must be"),
    *((states(b"N", with_attribute(name)), "cannot have") for name in ("update", "learning_rate")),
    (states(b"N", mxnet_array(RAW)), "not of the states of a gluon.Trainer"),
    (b"\x80\x02R.", "damaged"),
]


def test_crafted_pickles(tmp_path):
    run = Training()
    for content, message in PICKLES:
        refused(run, content, tmp_path / "states", message)


CODE = b"\x82\xf0"  # of an extension


def test_codes_of_extensions_are_refused(tmp_path, monkeypatch):
    """Python keeps what a code stands for, and would not ask an unpickler again."""
    monkeypatch.chdir(tmp_path)
    run, path = Training(), tmp_path / "states"
    copyreg.add_extension("posix", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02" + CODE + b".") is os.system
        harm = CODE + text("touch owned") + b"\x85R"
        refused(run, states(harm), path, "the code of an extension, 240")
        # A frame ends after two of six bytes. Python drops these and reads six more; `genops` does
        # not, and takes the code for a part of the second value.
        frame = b"\x80\x04\x95" + struct.pack("<Q", 4) + b"U\x06ab"
        refused(run, frame + b"cdef" + b"U%c" % len(harm) + harm + b".", path)
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "owned").exists()
