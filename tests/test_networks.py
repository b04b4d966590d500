"""Networks and data of every kind, trained as a user would."""

import mxnet as mx
import numpy as np
import pytest
from loops import plain_step
from mxnet import gluon
from problems import IS_NUMPY_LIKE, array
from sklearn.datasets import load_digits

from gluon_svrg import SVRGTrainer

HYBRIDIZE = [None, {}, {"static_alloc": True}]
ops = mx.np if IS_NUMPY_LIKE else mx.nd
RATE = {"learning_rate": 0.1}


def gradients(net):
    mx.nd.waitall()
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return np.concatenate([p.grad().asnumpy().ravel() for p in params])


def mean_estimate(trainer, net, closures, counts):
    """The mean of v over all minibatches, per loss entry."""
    total = 0.0
    for closure in closures:
        trainer.correct_grads(closure)
        total = total + gradients(net)
    return total / sum(counts)


def mean_gradient(net, closures, counts):
    total = 0.0
    for closure in closures:
        with mx.autograd.record():
            loss = closure()
        mx.autograd.backward(loss)
        total = total + gradients(net)
    return total / sum(counts)


def assert_unbiased(trainer, net, closures, counts, tolerance=2e-5):
    """At other weights than the snapshot's, the mean of v is the gradient."""
    trainer.step(counts[0], closure=closures[0])
    expected = mean_gradient(net, closures, counts)
    trainer.step(counts[0], closure=closures[0])
    expected = mean_gradient(net, closures, counts)
    found = mean_estimate(trainer, net, closures, counts)
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


# --- recurrent ---------------------------------------------------------------------------------

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow green turtle " * 3
LETTERS = sorted(set(TEXT))


class LanguageModel(gluon.HybridBlock):
    """Letters, an LSTM, and letters again. The state is an input and an output."""

    def __init__(self):
        super().__init__()
        self.units = 12
        self.embed = gluon.nn.Embedding(len(LETTERS), 6)
        self.lstm = gluon.rnn.LSTM(self.units, input_size=6)
        self.out = gluon.nn.Dense(len(LETTERS), flatten=False, in_units=self.units)

    def forward(self, text, *state):
        outputs, state = self.lstm(self.embed(text), list(state))
        return self.out(outputs), state

    def zero_state(self, batch):
        return self.lstm.begin_state(batch)


def text_batches(steps=10, batch=4):
    """The text in `batch` columns, cut into pieces of `steps` letters; inputs and targets."""
    codes = np.array([LETTERS.index(letter) for letter in TEXT])
    length = (len(codes) - 1) // batch
    columns = [codes[i : i + batch * length].reshape(batch, length).T for i in (0, 1)]
    return [
        tuple(array(column[start : start + steps], "float32") for column in columns)
        for start in range(0, length - steps + 1, steps)
    ]


def test_a_language_model_with_a_state_that_is_carried_on():
    """The state enters the closure; it does not live in it."""
    net = LanguageModel()
    net.initialize()
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 2.0})

    def loss_of(inputs, targets, *state):
        output, _ = net(inputs, *state)
        return loss_function(output.reshape((-1, len(LETTERS))), targets.reshape((-1,)))

    def with_states():
        """Each minibatch with the state that the one before leaves behind."""
        state = net.zero_state(4)
        for inputs, targets in text_batches():
            yield (inputs, targets, *state)
            _, state = net(inputs, *state)

    losses = []
    for _ in range(3):
        losses.append(trainer.update_full_grads(loss_of, with_states()))
        for batch in with_states():
            trainer.step(40, closure=lambda: loss_of(*batch))
    assert losses[-1] < losses[0]
    sizes = [40] * len(text_batches())
    assert trainer.grad_evaluations == 3 * (2 * sum(sizes) + sum(sizes))


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_minibatches_of_other_shapes(hybridize):
    """Bucketing: sentences of several lengths."""
    net = gluon.rnn.GRU(5, input_size=3)
    net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)
    rng = np.random.RandomState(0)
    sentences = [array(rng.randn(length, 2, 3), "float32") for length in (3, 5, 3, 7, 5)]

    def loss_of(x):
        return ((net(x) - 0.3) ** 2).sum(axis=2)

    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    trainer.update_full_grads(loss_of, sentences)
    closures = [lambda x=x: loss_of(x) for x in sentences]
    assert_unbiased(trainer, net, closures, [2 * len(x) for x in sentences], 1e-4)


# --- images ------------------------------------------------------------------------------------


def digits(count=200):
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels[:count] / 16).reshape(-1, 1, 8, 8).astype("float32")
    return images, labels[:count].astype("float32")


def convolutions():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 3, padding=1),
        gluon.nn.BatchNorm(),
        gluon.nn.Activation("relu"),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Flatten(),
        gluon.nn.Dropout(0.2),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    return net


def shifted(image, label):
    """Random augmentation belongs into the loader."""
    return np.roll(image, np.random.randint(-1, 2), axis=2), label


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_convolutions_with_batch_norm_dropout_and_augmentation(hybridize):
    net = convolutions()
    if hybridize is not None:
        net.hybridize(**hybridize)
    images, labels = digits()
    data = gluon.data.ArrayDataset(images, labels)
    loader = gluon.data.DataLoader(data.transform(shifted), batch_size=32, shuffle=True)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, lock_random=True)

    def loss_of(X, y):
        return loss_function(net(X), y)

    losses = []
    for _ in range(3):
        losses.append(trainer.update_full_grads(loss_of, loader))
        for X, y in loader:
            trainer.step(len(X), closure=lambda: loss_of(X, y))
    assert losses[-1] < losses[0]


def test_fine_tuning_with_frozen_layers():
    """A frozen body in the trainer's own list of parameters."""
    images, labels = digits()
    net = convolutions()
    net(array(images[:2], "float32"))
    for layer in list(net)[:3]:
        for p in layer.collect_params().values():
            p.grad_req = "null"
    frozen = net[0].weight.data().asnumpy()
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = SVRGTrainer(net.collect_params(), "adam", {"learning_rate": 0.05}, lock_random=True)
    X, y = array(images, "float32"), array(labels, "float32")

    def loss_of(start):
        return loss_function(net(X[start : start + 50]), y[start : start + 50])

    losses = []
    for _ in range(3):
        losses.append(trainer.update_full_grads(loss_of, range(0, 200, 50)))
        for start in range(0, 200, 50):
            trainer.step(50, closure=lambda: loss_of(start))
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(net[0].weight.data().asnumpy(), frozen)


# --- parameters --------------------------------------------------------------------------------


class Tied(gluon.Block):
    """One weight used twice, a constant, and a weight that is frozen."""

    def __init__(self):
        super().__init__()
        constant = np.array([[1.0, 2.0, 3.0]])
        if IS_NUMPY_LIKE:
            self.shared = gluon.Parameter("weight", shape=(3, 3))
            self.frozen = gluon.Parameter("frozen_weight", shape=(3, 3), grad_req="null")
            self.constant = gluon.Constant(array(constant, "float32"))
        else:
            self.shared = self.params.get("weight", shape=(3, 3))
            self.frozen = self.params.get("frozen_weight", shape=(3, 3), grad_req="null")
            self.constant = self.params.get_constant("constant", constant)

    def forward(self, x):
        w, f, c = self.shared.data(), self.frozen.data(), self.constant.data()
        return ops.tanh(ops.dot(ops.dot(ops.tanh(ops.dot(x, w)), f), w)) * c


def test_shared_frozen_and_constant_parameters():
    net = Tied()
    net.initialize(mx.init.Normal(0.5))
    x = array(np.random.RandomState(0).randn(12, 3), "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)

    def loss_of(start):
        return ((net(x[start : start + 4]) - 1) ** 2).sum(axis=1)

    trainer.update_full_grads(loss_of, (0, 4, 8))
    assert list(trainer.full_grads) == [net.shared]
    closures = [lambda start=start: loss_of(start) for start in (0, 4, 8)]
    assert_unbiased(trainer, net, closures, [4, 4, 4])


def test_two_blocks_that_share_their_parameters():
    first = gluon.nn.Dense(3, in_units=3, activation="tanh")
    if IS_NUMPY_LIKE:
        second = gluon.nn.Dense(3, in_units=3, activation="tanh")
        second.share_parameters(first.collect_params())
    else:
        second = gluon.nn.Dense(3, in_units=3, activation="tanh", params=first.params)
    net = gluon.nn.HybridSequential()
    net.add(first, second)
    first.initialize()
    net.hybridize()
    x = array(np.random.RandomState(0).randn(12, 3), "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)

    def loss_of(start):
        return ((net(x[start : start + 4]) - 1) ** 2).sum(axis=1)

    trainer.update_full_grads(loss_of, (0, 4, 8))
    closures = [lambda start=start: loss_of(start) for start in (0, 4, 8)]
    assert_unbiased(trainer, first, closures, [4, 4, 4])


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # MXNet, of the input of the block
def test_a_symbol_block(tmp_path):
    """An exported network, BatchNorm's statistics included."""
    images, labels = digits(60)
    net = convolutions()
    net.hybridize()
    net(array(images[:2], "float32"))
    net.export(str(tmp_path / "net"))
    imported = gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    X, y = array(images, "float32"), array(labels, "float32")
    trainer = SVRGTrainer(
        imported.collect_params(), "sgd", {"learning_rate": 1.0}, lock_random=True
    )

    def loss_of(start):
        return loss_function(imported(X[start : start + 20]), y[start : start + 20])

    def statistics():
        mx.nd.waitall()
        return [p.data().asnumpy() for n, p in imported.collect_params().items() if "running" in n]

    before = statistics()
    losses = []
    for _ in range(3):
        losses.append(trainer.update_full_grads(loss_of, (0, 20, 40)))
        if len(losses) == 1:
            assert all(map(np.array_equal, statistics(), before))
        for start in (0, 20, 40):
            trainer.step(20, closure=lambda: loss_of(start))
    assert losses[-1] < losses[0]
    assert len(before) == 2
    assert not any(map(np.array_equal, statistics(), before))


def two_heads():
    body, heads = gluon.nn.Dense(4, activation="tanh", in_units=3), []
    net = gluon.nn.HybridSequential()
    net.add(body)
    for _ in range(2):
        heads.append(gluon.nn.Dense(1, in_units=4))
        net.add(heads[-1])
    net.initialize(mx.init.Xavier())
    return net, body, heads


@pytest.mark.parametrize("ignore_stale_grad", [False, True])
def test_minibatches_that_touch_only_some_parameters(ignore_stale_grad):
    net, body, heads = two_heads()
    x = array(np.random.RandomState(0).randn(12, 3), "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)

    def loss_of(start):
        return ((heads[start // 4 % 2](body(x[start : start + 4])) - 1) ** 2).sum(axis=1)

    trainer.update_full_grads(loss_of, (0, 4, 8))
    closures = [lambda start=start: loss_of(start) for start in (0, 4, 8)]
    if ignore_stale_grad:
        before = [head.weight.data().asnumpy() for head in heads]
        trainer.step(4, ignore_stale_grad=True, closure=closures[0])
        for head, weight in zip(heads, before):  # v is not zero there: mu is not
            assert not np.array_equal(head.weight.data().asnumpy(), weight)
    else:
        with pytest.raises(UserWarning, match="has not been updated by backward since last"):
            trainer.step(4, closure=closures[0])
    found = mean_estimate(trainer, net, closures, [4, 4, 4])
    total = 0.0
    for closure in closures:
        for p in net.collect_params().values():
            p.grad()[:] = 0
        total = total + mean_gradient(net, [closure], [1])
    np.testing.assert_allclose(found, total / 12, atol=1e-5)


def test_several_losses_at_once():
    net, body, heads = two_heads()
    x = array(np.random.RandomState(0).randn(12, 3), "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)

    def loss_of(start):
        features = body(x[start : start + 4])
        return [((head(features) - i) ** 2).sum(axis=1) for i, head in enumerate(heads)]

    mean = trainer.update_full_grads(loss_of, (0, 4, 8))
    losses = [loss.asnumpy() for start in (0, 4, 8) for loss in loss_of(start)]
    assert mean == pytest.approx(np.mean(losses), rel=1e-6)
    closures = [lambda start=start: loss_of(start) for start in (0, 4, 8)]
    assert_unbiased(trainer, net, closures, [8, 8, 8])


def test_losses_that_are_averaged_already():
    """Each minibatch is one entry; with equal sizes that is the same training."""
    weights = []
    for averaged in (False, True):
        mx.random.seed(4)
        net = gluon.nn.Dense(1, in_units=3)
        net.initialize(mx.init.Normal(0.3))
        x = array(np.random.RandomState(0).randn(12, 3), "float32")
        trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)

        def loss_of(start):
            loss = ((net(x[start : start + 4]) - 1) ** 2).sum(axis=1)
            return loss.mean() if averaged else loss

        for _ in range(3):
            trainer.update_full_grads(loss_of, (0, 4, 8))
            for start in (0, 4, 8):
                trainer.step(1 if averaged else 4, closure=lambda: loss_of(start))
        weights.append(net.weight.data().asnumpy())
    np.testing.assert_allclose(*weights, rtol=1e-5)


# --- data --------------------------------------------------------------------------------------


def test_padding_that_the_closure_cuts_off():
    """An NDArrayIter pads its last batch; what it pads with must not count."""
    rng = np.random.RandomState(0)
    X, y = rng.randn(10, 3).astype("float32"), rng.randn(10, 1).astype("float32")
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    loss_function = gluon.loss.L2Loss()
    trainer = SVRGTrainer(net.collect_params(), "sgd", RATE)
    data = mx.io.NDArrayIter(X, y, batch_size=4)

    def loss_of(batch):
        used = batch.data[0].shape[0] - batch.pad
        inputs, labels = (
            array(a[0].asnumpy()[:used], "float32") for a in (batch.data, batch.label)
        )
        return loss_function(net(inputs), labels)

    trainer.update_full_grads(loss_of, data)
    assert trainer.grad_evaluations == sum([4, 4, 2])
    residual = X @ net.weight.data().asnumpy().T + net.bias.data().asnumpy() - y
    expected = (residual * X).mean(axis=0)
    found = trainer.full_grads[net.weight][0].asnumpy()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for batch in data:
        trainer.step(4 - batch.pad, closure=lambda: loss_of(batch))
    assert trainer.inner_steps == 3


def test_the_warning_about_stale_gradients_is_that_of_gluon_trainer():
    net, body, heads = two_heads()
    x = array(np.ones((4, 3)), "float32")
    messages = []
    for cls in (gluon.Trainer, SVRGTrainer):
        trainer = cls(net.collect_params(), "sgd", RATE)
        both = lambda: sum(head(body(x)) for head in heads)  # noqa: E731
        one = lambda: heads[0](body(x))  # noqa: E731
        if cls is SVRGTrainer:
            trainer.update_full_grads(both, [()])
        step(cls, trainer, both)
        with pytest.raises(UserWarning, match="has not been updated") as caught:  # MXNet raises it
            step(cls, trainer, one)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def step(cls, trainer, closure):
    if cls is gluon.Trainer:
        plain_step(trainer, closure, 4)
    else:
        trainer.step(4, closure=closure)
