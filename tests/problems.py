"""Small problems, as a Gluon network and as NumPy. None interpolates: some loss is left over."""

import os
import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

IS_NUMPY_LIKE = mx.util.is_np_array()  # 2.0, or 1.9.1 after npx.set_np()


def contexts(count):
    """The devices of a test: those that GLUON_SVRG_TEST_DEVICES names, or as many of the CPU."""
    named = os.environ.get("GLUON_SVRG_TEST_DEVICES", "")
    if not named:
        return [mx.cpu(i) for i in range(count)]
    found = [re.fullmatch(r"\s*(cpu|gpu)\((\d+)\)\s*", name) for name in named.split(",")]
    if not all(found):
        raise ValueError(f"GLUON_SVRG_TEST_DEVICES: {named!r} is not such as 'gpu(0),gpu(1)'")
    if len(found) < count:
        reason = f"GLUON_SVRG_TEST_DEVICES names {len(found)} devices, {count} are needed"
        pytest.skip(reason, allow_module_level=True)
    return [getattr(mx, match[1])(int(match[2])) for match in found[:count]]


def array(values, dtype="float64", device=None):
    """An MXNet array of the interface that this MXNet's Gluon computes with."""
    if IS_NUMPY_LIKE:
        return mx.np.array(np.asarray(values, dtype=dtype), dtype=dtype, ctx=device or mx.cpu())
    return mx.nd.array(np.asarray(values, dtype=dtype), dtype=dtype, ctx=device or mx.cpu())


class Dense:
    """A dense network of tanh units, linear without them, for 'regression' or 'classification'."""

    def __init__(self, task, hidden=(), samples=23, features=4, outputs=3, seed=0):
        rng = np.random.RandomState(seed)
        self.task = task
        self.sizes = [features, *hidden, outputs if task == "classification" else 1]
        self.X = rng.randn(samples, features)
        noise = rng.randn(samples)
        if task == "classification":
            self.y = rng.randint(0, outputs, samples).astype("float64")
        else:
            self.y = (self.X.sum(axis=1) + noise)[:, None]
        self.initial = []
        for inputs, units in zip(self.sizes, self.sizes[1:]):
            self.initial += [rng.randn(units, inputs) * 0.5, rng.randn(units) * 0.1]

    # --- NumPy -------------------------------------------------------------------------------
    def batches(self, size, order=None):
        """Index arrays; the last may be shorter."""
        order = np.arange(len(self.X)) if order is None else np.asarray(order)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def gradient(self, weights, index):
        """Sum over the samples in `index`, by backpropagation by hand."""
        return self.loss_and_gradient(weights, index)[1:]

    def loss_and_gradient(self, weights, index):
        """The same, after the sum of the losses."""
        X, y = self.X[index], self.y[index]
        activations, layers = [X], list(zip(weights[::2], weights[1::2]))
        for number, (weight, bias) in enumerate(layers):
            z = activations[-1] @ weight.T + bias
            activations.append(z if number == len(layers) - 1 else np.tanh(z))
        if self.task == "classification":
            exponentials = np.exp(z - z.max(axis=1, keepdims=True))
            delta = exponentials / exponentials.sum(axis=1, keepdims=True)
            loss = -np.log(delta[np.arange(len(y)), y.astype(int)]).sum()
            delta[np.arange(len(y)), y.astype(int)] -= 1
        else:
            delta = z - y
            loss = (delta**2).sum() / 2
        grads = []
        for (weight, _), inputs in zip(reversed(layers), reversed(activations[:-1])):
            grads = [delta.T @ inputs, delta.sum(axis=0), *grads]
            delta = (delta @ weight) * (1 - inputs**2)
        return loss, grads, len(index)

    # --- Gluon -------------------------------------------------------------------------------
    def network(self, dtype="float64", devices=None, deferred=False, hybridize=None):
        """A network that starts at the initial weights (unless it is deferred)."""
        net = gluon.nn.HybridSequential()
        for number, (inputs, units) in enumerate(zip(self.sizes, self.sizes[1:])):
            is_last = number == len(self.sizes) - 2
            settings = {"activation": None if is_last else "tanh", "dtype": dtype}
            net.add(gluon.nn.Dense(units, in_units=0 if deferred else inputs, **settings))
        net.initialize(ctx=devices)
        if not deferred:
            self.assign(net, self.initial)
        if hybridize is not None:
            net.hybridize(**hybridize)
        return net

    def assign(self, net, weights):
        for parameter, value in zip(parameters(net), weights):
            parameter.set_data(array(value, dtype=parameter.dtype))

    def loss_function(self):
        if self.task == "classification":
            return gluon.loss.SoftmaxCrossEntropyLoss()
        return gluon.loss.L2Loss()

    def closure(self, net, dtype="float64", devices=None, split=None):
        """A function of an index array that returns one loss, or those of the devices' parts."""
        loss_function = self.loss_function()

        def of_part(index, device=None):
            X, y = (array(each[index], dtype, device) for each in (self.X, self.y))
            return loss_function(net(X), y)

        def loss_of(index):
            if devices is None:
                return of_part(index)
            parts = split(index) if split else np.array_split(index, len(devices))
            return [of_part(*each) for each in zip(parts, devices) if len(each[0])]

        return loss_of


class Tied(Dense):
    """Its two hidden layers are the same one. Keys of parameters have gaps in MXNet 2.0."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.initial[:2] = self.initial[2:4]

    def gradient(self, weights, index):
        (*hidden, weight, bias), count = super().gradient(weights, index)
        both = [first + second for first, second in zip(hidden[:2], hidden[2:])]
        return [*both, *both, weight, bias], count

    def network(self, dtype="float64", devices=None, hybridize=None):
        settings = {"in_units": 4, "activation": "tanh", "dtype": dtype}
        first = gluon.nn.Dense(4, **settings)
        if hasattr(first, "share_parameters"):
            same = gluon.nn.Dense(4, **settings).share_parameters(first.collect_params())
        else:
            same = gluon.nn.Dense(4, **settings, params=first.params)
        net, last = gluon.nn.HybridSequential(), gluon.nn.Dense(3, in_units=4, dtype=dtype)
        net.add(first, same, last)
        for layer in (first, last):
            layer.initialize(ctx=devices)
        self.assign(net, self.initial)
        if hybridize is not None:
            net.hybridize(**hybridize)
        return net


class Partly(Dense):
    """Two of its minibatches do not reach the first layer, or those before a sample do not."""

    def __init__(self, *args, reached_from=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.reached_from = reached_from

    def is_cut(self, index):
        return index[0] < self.reached_from or (not self.reached_from and index[0] in (0, 10))

    def closure(self, net, dtype="float64", devices=None):
        cut = super().closure(lambda X: net[1](net[0](X).detach()), dtype, devices)
        whole = super().closure(net, dtype, devices)
        return lambda index: (cut if self.is_cut(index) else whole)(index)

    def gradient(self, weights, index):
        (first, second, *rest), count = super().gradient(weights, index)
        return [*((0 * first, 0 * second) if self.is_cut(index) else (first, second)), *rest], count


class Words(Dense):
    """Words for an embedding: 'dense', or with a 'sparse gradient' or a 'sparse weight'."""

    def __init__(self, embedding, samples):
        super().__init__("classification", samples=samples)
        self.embedding = embedding
        self.X = np.random.RandomState(2).randint(0, 15, (samples, 3))  # some never occur

    def network(self, dtype="float32", devices=None, deferred=False, hybridize=None):
        mx.random.seed(1)
        net = gluon.nn.Sequential()
        if self.embedding == "sparse weight":
            net.add(gluon.contrib.nn.SparseEmbedding(20, 4))
        else:
            net.add(gluon.nn.Embedding(20, 4, sparse_grad=self.embedding == "sparse gradient"))
        net.add(gluon.nn.Dense(3, in_units=12))
        net.initialize(mx.init.Normal(0.5), ctx=devices)
        return net


def parameters(net):
    """Weight and bias of each layer, in order."""
    return [parameter for layer in net for parameter in (layer.weight, layer.bias)]


def values(net, device=None):
    """The weights as NumPy float64."""
    arrays = [p.data(device) if device else p.list_data()[0] for p in parameters(net)]
    return [array.asnumpy().astype("float64") for array in arrays]


def values_of_any(params):
    """Values of parameters; of a row_sparse one all rows, which a worker does not have."""
    for p in params:
        if getattr(p, "_stype", "default") == "row_sparse":
            rows = mx.nd.arange(p.shape[0], ctx=p.list_ctx()[0], dtype="int64")
            yield p.row_sparse_data(rows).tostype("default").asnumpy()
        else:
            yield p.list_data()[0].asnumpy()


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays])


def distance(these, those):
    """The largest difference between lists of arrays, relative to the largest entry."""
    scale = max(np.abs(that).max() for that in those)
    return max(np.abs(this - that).max() for this, that in zip(these, those)) / scale
