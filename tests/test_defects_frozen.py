"""Values that stay: frozen parameters, the rest of a network, parameters that no loss reached."""

import mxnet as mx
import numpy as np
import pytest
from loops import plain_step
from mxnet import autograd, gluon
from problems import Dense, array, distance

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("regression", samples=22, seed=32)
BATCHES = PROBLEM.batches(5)

# --- a frozen matrix that moves ----------------------------------------------------------------


class Distilled(gluon.Block):
    """A student that learns the data and a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.student = gluon.nn.HybridSequential()
        self.student.add(
            gluon.nn.Dense(5, activation="tanh", in_units=4, dtype="float64"),
            gluon.nn.Dense(1, in_units=5, dtype="float64"),
        )
        self.teacher = gluon.nn.HybridSequential()
        self.teacher.add(
            gluon.nn.Dense(5, activation="tanh", in_units=4, dtype="float64"),
            gluon.nn.Dense(1, in_units=5, dtype="float64"),
        )
        self.initialize(mx.init.Normal(0.5))
        for parameter in self.teacher.collect_params().values():
            parameter.grad_req = "null"

    def forward(self, x):
        return self.student(x), self.teacher(x)

    def follow(self, share=0.5):
        """Let the teacher follow the student, whose weights have moved by themselves."""
        random = np.random.RandomState(4)
        for parameter in self.student.collect_params().values():
            noise = array(0.3 * random.randn(*parameter.shape))
            parameter.data()[:] = parameter.data() + noise
        for layer, other in zip(self.teacher, self.student):
            for name in ("weight", "bias"):
                mine, theirs = getattr(layer, name), getattr(other, name)
                mine.set_data(share * mine.data() + (1 - share) * theirs.data())


def distilled(hybridize=False):
    mx.random.seed(5)
    net = Distilled()
    if hybridize:
        net.student.hybridize()
        net.teacher.hybridize()
    loss_function = gluon.loss.L2Loss()

    def loss_of(index):
        student, teacher = net(array(PROBLEM.X[index]))
        return loss_function(student, array(PROBLEM.y[index])) + loss_function(student, teacher)

    return net, loss_of, SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})


def student_gradients(net):
    return [p.grad().asnumpy().copy() for p in net.student.collect_params().values()]


def sum_over_minibatches(net, take):
    found = []
    for index in BATCHES:
        take(index)
        found.append(student_gradients(net))
    return [sum(parts) for parts in zip(*found)]


def outputs(net):
    return [out.asnumpy() for out in net(array(PROBLEM.X))]


@pytest.mark.parametrize("hybridize", [False, True])
def test_the_mean_of_the_estimates_is_the_gradient_with_the_teacher_of_today(hybridize):
    net, loss_of, trainer = distilled(hybridize)
    trainer.update_full_grads(loss_of, BATCHES)
    net.follow()
    found = sum_over_minibatches(net, lambda index: trainer.correct_grads(lambda: loss_of(index)))

    def plain(index):
        with autograd.record():
            loss = loss_of(index)
        loss.backward()

    expected = sum_over_minibatches(net, plain)
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize("hybridize", [False, True])
def test_at_snapshot_computes_with_the_teacher_of_that_moment(hybridize):
    net, loss_of, trainer = distilled(hybridize)
    then = outputs(net)
    trainer.update_full_grads(loss_of, BATCHES)
    net.follow()
    now = outputs(net)
    with trainer.at_snapshot():
        there = outputs(net)
    for these, those in zip(there, then):
        np.testing.assert_array_equal(these, those)
    for these, those in zip(outputs(net), now):
        np.testing.assert_array_equal(these, those)


def test_the_teacher_of_the_snapshot_is_saved(tmp_path):
    net, loss_of, trainer = distilled()
    then = outputs(net)
    trainer.update_full_grads(loss_of, BATCHES)
    net.follow()
    trainer.save_states(str(tmp_path / "states"))
    net.save_parameters(str(tmp_path / "parameters"))
    with mx.name.NameManager():
        net, _, trainer = distilled()
    net.load_parameters(str(tmp_path / "parameters"))
    trainer.load_states(str(tmp_path / "states"))
    with trainer.at_snapshot():
        for these, those in zip(outputs(net), then):
            np.testing.assert_array_equal(these, those)


# --- the rest of a network, after a resume -----------------------------------------------------


class Parts:
    """A body with BatchNorm that has no trainer, and a head that has."""

    def __init__(self):
        mx.random.seed(1)
        self.body = gluon.nn.HybridSequential()
        self.body.add(
            gluon.nn.Dense(6, activation="tanh", in_units=4), gluon.nn.BatchNorm(in_channels=6)
        )
        self.head = gluon.nn.Dense(1, in_units=6)
        self.net = gluon.nn.HybridSequential()
        self.net.add(self.body, self.head)
        self.net.initialize(mx.init.Xavier())
        self.trainer = SVRGTrainer(self.head.collect_params(), "sgd", {"learning_rate": 0.1})
        self.loss_of = PROBLEM.closure(self.net, "float32")

    def step(self, index):
        self.trainer.step(len(index), closure=lambda: self.loss_of(index))

    def statistics(self):
        mx.nd.waitall()
        norm = self.body[1]
        return [norm.running_mean.data().asnumpy(), norm.running_var.data().asnumpy()]


def test_statistics_of_the_rest_after_a_resume(tmp_path):
    parts = Parts()
    parts.trainer.update_full_grads(parts.loss_of, BATCHES)
    parts.step(BATCHES[0])
    parts.trainer.save_states(str(tmp_path / "states"))
    parts.net.save_parameters(str(tmp_path / "parameters"))
    with mx.name.NameManager():
        resumed = Parts()
    resumed.net.load_parameters(str(tmp_path / "parameters"))
    resumed.trainer.load_states(str(tmp_path / "states"))
    for index in BATCHES[1:]:
        for these in (parts, resumed):
            these.step(index)
        for now, expected in zip(resumed.statistics(), parts.statistics()):
            np.testing.assert_array_equal(now, expected)


# --- parameters that no loss reached -----------------------------------------------------------


def two_heads(cls, snapshot, **kwargs):
    """Steps that reach one of two heads, with `ignore_stale_grad`; the weights afterwards."""
    mx.random.seed(2)
    body, *heads = (gluon.nn.Dense(n, in_units=k) for n, k in ((5, 4), (1, 5), (1, 5)))
    params = []
    for layer in (body, *heads):
        layer.initialize(mx.init.Normal(0.5))
        params += [layer.weight, layer.bias]
    settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    trainer = cls(params, "sgd", settings, **kwargs)
    loss_function = gluon.loss.L2Loss()

    def loss_of(index, number):
        X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index], "float32")
        return loss_function(heads[number](body(X)), y)

    def both(index):
        return loss_of(index, 0) + loss_of(index, 1)

    def step(closure, **options):
        if cls is gluon.Trainer:
            plain_step(trainer, closure, 5, **options)
        else:
            trainer.step(5, closure=closure, **options)

    if snapshot:
        trainer.update_full_grads(both, BATCHES)
    step(lambda: both(BATCHES[0]))
    for number, index in enumerate(BATCHES[1:]):
        step(lambda: loss_of(index, number % 2), ignore_stale_grad=True)
    return [p.data().asnumpy() for p in params]


@pytest.mark.parametrize(
    "snapshot",
    [
        False,
        pytest.param(
            True,
        ),
    ],
)
def test_coefficient_0_is_gluon_trainer_where_no_loss_reaches_a_parameter(snapshot):
    found = two_heads(SVRGTrainer, snapshot, coefficient=0.0)
    for these, those in zip(found, two_heads(gluon.Trainer, False)):
        np.testing.assert_array_equal(these, those)
