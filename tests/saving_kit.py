"""What tests of files share: a `gluon.Trainer` taken apart, a toy of a part, and comparisons."""

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import saving

HERE = mx.__version__[0]


class Toy:
    """A part that is a dict."""

    def __init__(self, **values):
        self.values = values
        self.assigned = 0

    def state(self):
        return dict(self.values)

    def problems(self, state):
        if not isinstance(state, dict) or state.keys() != self.values.keys():
            yield "the toy is another"

    def assign(self, state):
        self.values = dict(state)
        self.assigned += 1


class Training:
    """A network of two or more layers, a `gluon.Trainer`, and its parts."""

    def __init__(
        self,
        optimizer="sgd",
        settings=None,
        sizes=(3, 4, 2),
        devices=None,
        dtype="float32",
        parameters=None,
        **kwargs,
    ):
        self.devices = devices or [mx.cpu()]
        self.sizes, self.dtype = sizes, dtype
        self.net = gluon.nn.HybridSequential()
        for inputs, units in zip(sizes, sizes[1:]):
            self.net.add(gluon.nn.Dense(units, in_units=inputs, use_bias=dtype == "float32"))
        self.net.initialize(mx.init.Xavier(), ctx=self.devices)
        self.net.cast(dtype)
        collected = parameters(self.net) if parameters else self.net.collect_params()
        self.given = collected
        settings = {"learning_rate": 0.1} if settings is None else settings
        self.trainer = gluon.Trainer(collected, optimizer, settings, **kwargs)
        self.toy = Toy(numbers=[1, 2.5, None, "x", (True,)])

    @property
    def optimizer(self):
        return self.trainer.optimizer

    @property
    def updaters(self):
        trainer = self.trainer
        if trainer._kv_initialized and trainer._update_on_kvstore:
            return [trainer._kvstore._updater]
        return list(trainer._updaters)

    def header(self, method="SVRG"):
        return saving.header(method, self.trainer._params, self.given, len(self.devices))

    def parts(self):
        params = self.trainer._params
        return {
            "optimizer": saving.OptimizerSettings(self.optimizer, params),
            "optimizer_states": saving.OptimizerStates(self.optimizer, self.updaters, params),
            "toy": self.toy,
        }

    def save(self, path):
        saving.write(path, self.header(), self.parts())

    def load(self, path):
        parts, header = self.parts(), self.header()
        states = parts["optimizer_states"].expected_bytes()
        saved = saving.read(path, header, saving.most_bytes(states, self.trainer._params))
        saved.check(parts, header)
        saved.assign(parts)
        return saved

    def step(self, times=1, seed=0):
        """Give every weight a gradient of its own and update."""
        for number in range(times):
            for parameter in self.trainer._params:
                value = self.gradient(parameter, number + seed)
                for grad, data in zip(parameter.list_grad(), parameter.list_data()):
                    grad[:] = (
                        value.as_np_ndarray()
                        if hasattr(grad, "as_np_ndarray") and type(grad) is not mx.nd.NDArray
                        else value
                    )
                    data._fresh_grad = True
            self.trainer.step(1)
        mx.nd.waitall()

    def gradient(self, parameter, number):
        size = int(np.prod(parameter.shape))
        values = np.cos(np.arange(size) * (1 + number % 7) + number).reshape(parameter.shape)
        return mx.nd.array(values / len(self.devices), dtype=self.dtype)

    def weights(self):
        return [d.asnumpy() for p in self.trainer._params for d in p.list_data()]

    def take_weights(self, other):
        for mine, its in zip(self.in_order(), other.in_order()):
            mine.set_data(its.list_data()[0].copy())

    def in_order(self):
        """Parameters by layer, whatever their order in the trainer."""
        return [p for layer in self.net for p in (layer.weight, layer.bias) if p is not None]

    def everything(self):
        """All that a file must not change when it is refused."""
        mx.nd.waitall()
        found = [repr(sorted(self.flat(vars(self.optimizer)).items())), self.toy.assigned]
        for updater in self.updaters:
            found += [repr(self.flat(updater.states)), repr(updater.states_synced)]
        return found

    def flat(self, value):
        if isinstance(value, dict):
            return {k: self.flat(v) for k, v in value.items() if k != "param_dict"}
        if isinstance(value, (list, tuple)):
            return [self.flat(item) for item in value]
        if isinstance(value, mx.nd.NDArray):
            return value.asnumpy().tolist()
        if isinstance(value, (mx.lr_scheduler.LRScheduler, mx.optimizer.Optimizer)):
            return self.flat(vars(value))
        return value


def scheduled(**kwargs):
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.02)
    return {"learning_rate": 0.02, "lr_scheduler": scheduler, **kwargs}


def assert_same(these, those):
    assert len(these) == len(those)
    for this, that in zip(these, those):
        np.testing.assert_array_equal(this, that)


def both_go_on(one, other, steps=3):
    for run in (one, other):
        mx.random.seed(3)
        run.step(steps, seed=5)
    assert_same(one.weights(), other.weights())


class Chain(mx.lr_scheduler.LRScheduler):
    """A scheduler of schedulers."""

    def __init__(self, *schedulers):
        super().__init__(base_lr=0.1)
        self.parts = list(schedulers)
        self.more = {"last": (1, schedulers[-1])}

    def __call__(self, num_update):
        return sum(scheduler(num_update) for scheduler in self.parts)
