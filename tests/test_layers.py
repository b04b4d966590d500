"""Layers and operators whose backward is MXNet's own business, and graphs that keep arrays.

`gluon.Trainer` asks of a backward only that, with a head of ones, it writes the gradient. So do
the trainers here: it need not be linear in its head, and need not add.
"""

from operator import methodcaller

import mxnet as mx
import numpy as np
import pytest
from kit import backward, clear, gradients, table
from mxnet import gluon
from plays import PARTS, STATIC, TWO, Play, each_method
from problems import IS_NUMPY_LIKE, Dense, array, distance, parameters, values

as_nd = methodcaller("as_nd_ndarray")
as_usual = methodcaller("as_np_ndarray") if IS_NUMPY_LIKE else as_nd


class Problem(Dense):
    """A problem whose gradients MXNet takes, on a network of its own that nothing else uses.

    The minibatch that begins with the sample `first` has the first weight in an operator alone.
    """

    def __init__(self, devices, hybridize=None, kind=None, operator=None, first=None):
        super().__init__("classification", hidden=(5,), seed=44)
        self.devices, self.graph, self.kind = devices, hybridize, kind
        self.operator, self.first = operator, first
        self.known = {}
        self.net = self.network()
        self.loss_of = self.closure(self.net)

    def gradient(self, weights, index):
        key = (b"".join(w.tobytes() for w in weights), index.tobytes())  # twins ask again and again
        if key not in self.known:
            self.known[key] = self.backward(weights, index)
        return self.known[key], len(index)

    def backward(self, weights, index):
        self.assign(self.net, weights)
        total = [np.zeros(w.shape) for w in weights]
        for part in np.array_split(index, len(self.devices or [0])):
            backward(lambda: self.loss_of(index, part))
            total = [t + p.grad().asnumpy() for t, p in zip(total, parameters(self.net))]
        return total

    def closure(self, net, dtype="float64", devices=None):
        loss_function, forward = self.loss_function(), self.forward(net)

        def of_part(index, part, device=None):
            X, y = array(self.X[part], device=device), array(self.y[part], device=device)
            if index[0] != self.first:
                return loss_function(forward(X), y)
            weight, bias = net[0].weight.data(device), net[0].bias.data(device)
            fixed, X = as_nd(weight.detach()), as_nd(X)  # only the operator reaches the weight
            hidden = mx.nd.FullyConnected(X, fixed, as_nd(bias), num_hidden=5).tanh()
            penalty = (self.operator(weight) ** 2).sum()
            return loss_function(net[1](as_usual(hidden)), y) + as_usual(penalty)

        def loss_of(index, part=None):
            if devices is None:
                return of_part(index, index if part is None else part)
            return [of_part(index, *each) for each in zip(np.array_split(index, 2), devices)]

        return loss_of

    def forward(self, net):
        """With a layer of `BENDS` between its own."""
        if self.kind is None:
            return net
        whole = gluon.nn.HybridSequential()
        whole.add(net[0], Bend(self.kind), net[1])
        if self.graph is not None:
            whole.hybridize(**self.graph)
        return whole


#: What a layer does to the signal that comes back; none is linear in it.
BENDS = {
    "clip": lambda signal: np.clip(signal, -0.1, 0.1),
    "sign": np.sign,
    "normalize": lambda signal: signal / (np.linalg.norm(signal) + 1e-6),
    "one sign": lambda signal: np.maximum(signal, 0),
    "its own": np.ones_like,  # as of SoftmaxOutput and MakeLoss
}


class BendOperator(mx.operator.CustomOp):
    """MXNet runs it in a thread."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        bent = BENDS[self.kind](out_grad[0].asnumpy())
        self.assign(in_grad[0], req[0], array(bent, out_grad[0].dtype, out_grad[0].context))


@mx.operator.register("bend")
class BendProperties(mx.operator.CustomOpProp):
    def __init__(self, kind):
        super().__init__(need_top_grad=True)
        self.kind = kind

    def create_operator(self, ctx, shapes, dtypes):
        return BendOperator(self.kind)


class Bend(gluon.HybridBlock):
    """The layer, for hybridized networks as well."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    if IS_NUMPY_LIKE:

        def forward(self, x):
            x = x.as_nd_ndarray()
            return mx.nd.Custom(x, op_type="bend", kind=self.kind).as_np_ndarray()
    else:

        def hybrid_forward(self, F, x):
            return F.Custom(x, op_type="bend", kind=self.kind)


@table(
    "kind, how, devices, hybridize",
    ("clip", "add", TWO, {}),
    ("sign", "halves", TWO, None),
    ("normalize", "halves", None, STATIC),
    ("one sign", "step", None, {"static_alloc": True}),
    ("its own", "add", None, None),
)
@each_method
def test_a_layer(case, kind, how, devices, hybridize):
    """Clips of a signal, signs, norms: an operator alone, or hybridized with its neighbours."""
    Play(case, Problem(devices, hybridize, kind), how, devices).run()


def masked(w):
    return mx.nd.contrib.boolean_mask(as_nd(w), mx.nd.array([1, 0, 1, 0, 1], ctx=w.context))


#: Of a weight; under `grad_req='add'` all but the last write, or add nothing. With a way to train.
OPERATORS = {
    "clip": (lambda w: as_nd(w).clip(-0.4, 0.4), "step", TWO, 15),
    "cumsum": (lambda w: as_nd(mx.np.cumsum(w.as_np_ndarray(), axis=0)), "halves", None, 0),
    "moments": (lambda w: mx.nd.moments(as_nd(w), axes=(0, 1))[1], "add", TWO, 0),
    "boolean_mask": (masked, "halves", TWO, 15),
}


@pytest.mark.parametrize("operator, how, devices, first", OPERATORS.values(), ids=OPERATORS)
@each_method
def test_an_operator_on_a_parameter(case, operator, how, devices, first):
    """Only the minibatch that begins there uses it. A plain gradient that is to add is MXNet's."""
    problem = Problem(devices, operator=operator, first=first)
    Play(case, problem, how, devices).run(parts=((), *PARTS[1:]) if how == "add" else PARTS)


class Penalized(Problem):
    """With a penalty on the first weight, outside the graph, in the minibatch of sample 0 alone."""

    def closure(self, net, dtype="float64", devices=None):
        loss_of = super().closure(net, dtype, devices)

        def penalized(index, *part):
            loss = loss_of(index, *part)
            return loss + (net[0].weight.data() ** 2).sum() if index[0] == 0 else loss

        return penalized


@each_method
def test_a_static_graph_and_a_penalty_that_ends(case):
    """MXNet keeps from the first minibatch on that a graph adds to the gradient of its weight."""
    play = Play(case, Penalized(None), "add", None, STATIC)
    play.run(parts=((0,), (3, 1, 4, 1), (2, 3)))


@each_method
def test_a_penalty_that_ends_after_a_change_of_grad_req(case):
    """Gradients add up where they were written at first; MXNet forgets arrays at a prediction."""
    problem = Penalized(None)
    play = Play(case, problem, "step", None, STATIC)
    play.epoch((3, 1))
    play.how = "add"
    play.require("add")
    play.refresh()
    play.net(array(problem.X))
    play.follow(0, 1, 3, 2)


class WithBackward(Play):
    """A training of a static graph in which the user's own backward comes between updates."""

    def __init__(self, case, how="step", devices=None):
        self.problem = Problem(devices)
        super().__init__(case, self.problem, how, devices, STATIC)

    def backward(self, step=False):
        clear(self.net)
        backward(lambda: self.loss_of(self.batches[2]))
        expected, _ = self.problem.gradient(values(self.net, self.device), self.batches[2])
        assert distance(gradients(self.net), expected) < 1e-10
        if step:  # of the plain optimizer: the first pass at other weights comes after a change
            self.trainer.step(5)
            self.twin.step(self.optimizer, self.batches[2])
        clear(self.net)


@table("devices, kinds", (None, ("step", "add")), (None, ("add", "halves")), (TWO, ("add", "step")))
@each_method
def test_a_static_graph_and_another_grad_req(case, devices, kinds):
    """It changes in mid-training, to and fro."""
    play = WithBackward(case, kinds[0], devices)
    for number, how in enumerate([*kinds, *kinds, *kinds]):
        play.how = how
        play.require("add" if how == "add" else "write")
        if number == 0 and case.needs_refresh:
            play.backward(step=True)
            continue
        if number < 4:
            play.backward()
        if number in (1, 2, 5):
            play.refresh()
        play.follow(*[(1, 3, 1), (4, 0, 2)][number % 2])
        if number % 3:
            play.backward()


@each_method
def test_a_static_graph_that_writes_elsewhere(case):
    """MXNet's graph keeps the arrays of old weights; `gluon.Trainer` does not learn then."""
    play = WithBackward(case)
    play.refresh()
    play.epoch((1, 3))
    before = values(play.net)
    for parameter in parameters(play.net):
        parameter.initialize(force_reinit=True)
    play.problem.assign(play.net, before)
    with pytest.raises(RuntimeError, match=r"net\.hybridize\("):
        play.epoch((0,))
    assert distance(values(play.net), before) == 0
    play.net.hybridize(**STATIC)
    play.follow(0, 2)
