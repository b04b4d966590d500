"""What differs between MXNet 1.9.1 and 2.0, and nearly all private names of MXNet that are used.

The code tests for features that stand for a version. ``from .. import _mxnet`` has the names in
`__all__` of these modules.
"""

from .amp import *
from .arrays import *
from .kvstore_trainer import *
from .optimizers import *
from .parameters import *
