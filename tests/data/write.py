"""Writes the files of this folder, with each MXNet: `python write.py FOLDER`.

They are of `gluon.Trainer`, in float32, and in float16 with float32 master copies.
"""

import sys

import mxnet as mx
from mxnet import gluon

for dtype, name in (("float32", "gluon"), ("float16", "gluon-float16")):
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False, dtype=dtype)
    layer.initialize(mx.init.One())
    settings = {"learning_rate": 0.5, "momentum": 0.5, "multi_precision": dtype == "float16"}
    plain = gluon.Trainer(layer.collect_params(), "sgd", settings)
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    plain.step(1)
    plain.save_states(f"{sys.argv[1]}/{name}-mxnet{mx.__version__[0]}.states")
