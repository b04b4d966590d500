"""What tests of files share: a `gluon.Trainer` taken apart, a toy of a part, and comparisons."""

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import saving

GENERATION = mx.__version__[0]


class Toy:
    """A part that is a dict."""

    def __init__(self):
        self.values, self.assigned = {"numbers": [1, 2.5, None, "x", (True,)]}, 0

    def state(self):
        return dict(self.values)

    def problems(self, state):
        if state.keys() != self.values.keys():
            yield "the toy is another"

    def assign(self, state):
        self.values, self.assigned = dict(state), self.assigned + 1


class Training:
    """A network of two or more layers, a `gluon.Trainer`, and its parts of a file.

    Parameters
    ----------
    choose : callable, optional
        Returns the parameters of a network that the trainer gets; by default all.
    """

    def __init__(
        self, optimizer="sgd", settings=None, sizes=(3, 4, 2), devices=None, choose=None, **kwargs
    ):
        self.devices = devices or [mx.cpu()]
        self.net = gluon.nn.HybridSequential()
        for inputs, units in zip(sizes, sizes[1:]):
            self.net.add(gluon.nn.Dense(units, in_units=inputs))
        self.net.initialize(mx.init.Xavier(), ctx=self.devices)
        given = choose(self.net) if choose else self.net.collect_params()
        settings = {"learning_rate": 0.1} if settings is None else settings
        self.trainer = gluon.Trainer(given, optimizer, settings, **kwargs)
        self.files = saving.StateFiles("SVRG", self.trainer._params, given)
        self.toy = Toy()

    @property
    def optimizer(self):
        return self.trainer.optimizer

    @property
    def updaters(self):
        trainer = self.trainer
        if trainer._kv_initialized and trainer._update_on_kvstore:
            return [trainer._kvstore._updater]
        return list(trainer._updaters)

    def parts(self):
        params = self.trainer._params
        return {
            "optimizer": saving.OptimizerSettings(self.optimizer, params),
            "optimizer_states": saving.OptimizerStates(self.optimizer, self.updaters, params),
            "toy": self.toy,
        }

    def save(self, path, source="save_states"):
        if source == "gluon.Trainer":
            self.trainer.save_states(str(path))
        else:
            self.files.save(path, self.parts())

    def load(self, path):
        self.files.load(path, self.parts())
        self.files.apply(self.parts())

    def step(self, times=1, seed=0):
        """Give every weight a gradient of its own, by its place in the network, and update."""
        trained = {id(p) for p in self.trainer._params}
        for number in range(times):
            for place, parameter in enumerate(self.in_order()):
                if id(parameter) in trained:
                    numbers = np.arange(np.prod(parameter.shape)).reshape(parameter.shape)
                    value = np.cos(numbers * (1 + place) + number + seed) / len(self.devices)
                    for grad, data in zip(parameter.list_grad(), parameter.list_data()):
                        grad[:] = mx.np.array(value) if GENERATION == "2" else mx.nd.array(value)
                        data._fresh_grad = True
            self.trainer.step(1)
        mx.nd.waitall()

    def in_order(self):
        """Parameters by layer, whatever their order in the trainer."""
        return [p for layer in self.net for p in (layer.weight, layer.bias)]

    def weights(self):
        return [d.asnumpy() for p in self.in_order() for d in p.list_data()]

    def take_weights(self, other):
        for mine, its in zip(self.in_order(), other.in_order()):
            mine.set_data(its.list_data()[0].copy())

    def everything(self):
        """All that a file must not change when it is refused."""
        mx.nd.waitall()
        states = [[updater.states, updater.states_synced] for updater in self.updaters]
        return repr(flat([vars(self.optimizer), states, self.toy.assigned]))


def flat(value):
    """Values that can be compared by their ``repr``."""
    if isinstance(value, (mx.lr_scheduler.LRScheduler, mx.optimizer.Optimizer)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items() if key != "param_dict"}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value.asnumpy().tolist() if isinstance(value, mx.nd.NDArray) else value


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


def crowded(name):
    """Settings of an optimizer with everything that a file can have."""
    chain = Chain(
        mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
        mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.5, base_lr=0.1),
    )
    return {"lr_scheduler": chain, **({"momentum": 0.9} if name == "sgd" else {})}
