"""Everything that differs between MXNet 1.9.1 and 2.0, and every private name of MXNet.

The code tests for features, not for versions. All other packages import it by
``from .. import _mxnet``.
"""

from .amp import LossScale
from .arrays import (
    classic,
    device_of,
    dtype_name,
    guard,
    is_numpy_like,
    is_refused_backward,
    like,
    not_traced,
    to_ndarray,
    unguarded,
)
from .gradients import Arrays, Flags, fresh, mark, put_gradients_into, take_fresh
from .open_trainer import OpenTrainer, barrier
from .optimizers import check_optimizer, class_of, last_rate, steps_along_gradient, weight_decays
from .parameters import (
    all_rows,
    data,
    devices,
    devices_of_estimator,
    dtype_of,
    gradients,
    has_data,
    has_sparse_values,
    is_auxiliary,
    is_deferred,
    is_sparse,
    is_trainable,
    put,
    put_gradients,
    reads_noted,
)
