"""Writes the files of this folder: `python write.py FOLDER`, with gluon_svrg 0.3.0 and each MXNet.

``0.3.0-mxnet1.npz``: for each method and optimizer, the bytes of ``save_states`` in mid-epoch, the
weights then and some steps later. ``gluon-mxnet1.states``: of `gluon.Trainer`, with ``-float16``
and float32 master copies too. ``PYTHONPATH`` names the package and tests of 0.3.0, with
``test_resume.py``, ``plays.py`` and ``saving_kit.py`` of today.
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import gluon
from test_resume import GENERATION, METHODS, MOMENTS, Run

import gluon_svrg

assert gluon_svrg.__version__ == "0.3.0"
folder = Path(sys.argv[1])
mx.random.seed(1)
found = {}
for method in METHODS:
    for optimizer in ("sgd", "adam"):
        with mx.name.NameManager():
            run = Run(method, optimizer, dtype="float64")
        weights = []
        for number, actions in enumerate(MOMENTS["in mid-epoch"]):
            run.play(actions)
            weights.append(np.concatenate([weight.ravel() for weight in run.weights()]))
            if number == 0:
                run.trainer.save_states(folder / "states")
                content = (folder / "states").read_bytes()
        found[f"{method} {optimizer}"] = np.frombuffer(content, np.uint8)
        found[f"{method} {optimizer} weights"] = np.stack(weights)
(folder / "states").unlink()
np.savez_compressed(folder / f"0.3.0-mxnet{GENERATION}.npz", **found)

for dtype, name in (("float32", "gluon"), ("float16", "gluon-float16")):
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False, dtype=dtype)
    layer.initialize(mx.init.One())
    settings = {"learning_rate": 0.5, "momentum": 0.5, "multi_precision": dtype == "float16"}
    plain = gluon.Trainer(layer.collect_params(), "sgd", settings)
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    plain.step(1)
    plain.save_states(f"{folder}/{name}-mxnet{GENERATION}.states")
