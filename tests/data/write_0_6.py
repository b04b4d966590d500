"""Writes files of version 0.6.0, with each MXNet: `python write_0_6.py FOLDER`.

It needs gluon_svrg 0.6.0 and the folder `tests` in PYTHONPATH.
"""

import sys

import mxnet as mx
from saving_kit import OF_0_6, play_0_6

for name in OF_0_6:
    path = f"{sys.argv[1]}/0.6.0-{name}-mxnet{mx.__version__[0]}.states"
    play_0_6(name, range(5)).save_states(path)
