"""A training with dropout, saved at each step and resumed there, is the same to the last bit.

From the first refresh on: MXNet's own random numbers, which earlier steps draw, cannot be saved.
"""

import warnings

import kit
import mxnet as mx
import numpy as np
import pytest
from test_methods import BATCHES, CASES, PROBLEM

ORDER = [0, 3, 1, 4, 2]
STEPS = [(epoch, number) for epoch in range(3) for number in ORDER]
RUNS = [(name, stored) for name in CASES for stored in (False, True)
        if not stored or CASES[name].trainer in ("SVRGTrainer", "SAGATrainer")]  # fmt: skip


def make(case):
    net = kit.with_dropout()
    settings = {"learning_rate": 0.05, "momentum": 0.5}
    lock = True if case.gradients == 1 and not case.indexed else "auto"  # it compares nothing
    params = net.collect_params()
    trainer = case.make_trainer(params, optimizer_params=settings, lock_random=lock)
    return net, PROBLEM.closure(net, "float32"), trainer


def play(case, stored, net, loss_of, trainer, begin, save=None):
    """Train from a step on; a refresh at the start of the second and third epoch."""
    found = []
    for position, (epoch, number) in enumerate(STEPS):
        if position < begin:
            continue
        if save is not None:
            save(position)
        if epoch and number == ORDER[0]:
            keeps = {"store_grads": True} if stored else {}
            trainer.update_full_grads(loss_of, BATCHES, **keeps)
        indexed = case.indexed or (stored and epoch > 0)
        row = {"batch_index": number} if indexed else {}
        index = BATCHES[number]
        trainer.step(len(index), closure=lambda: loss_of(index), **row)
        weights = [p.data().asnumpy() for p in net.collect_params().values()]
        found.append((weights, trainer.grad_evaluations, trainer.inner_steps))
    return found


@pytest.mark.parametrize(("name", "stored"), RUNS, ids=str)
def test_each_step(name, stored, tmp_path):
    case = CASES[name]
    net, loss_of, trainer = make(case)

    def save(position):
        net.save_parameters(str(tmp_path / f"{position}.params"))
        trainer.save_states(tmp_path / f"{position}.states")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it draws random numbers
        mx.random.seed(7)
        expected = play(case, stored, net, loss_of, trainer, 0, save)
        for begin in range(6, len(STEPS)):
            resumed, closure, other = make(case)
            resumed.load_parameters(str(tmp_path / f"{begin}.params"))
            other.load_states(tmp_path / f"{begin}.states")
            mx.random.seed(1000 + begin)  # MXNet's own numbers are those of another process
            found = play(case, stored, resumed, closure, other, begin)
            for step, (mine, theirs) in enumerate(zip(found, expected[begin:])):
                where = f"{name}, resumed at {begin}, step {begin + step}"
                for one, two in zip(mine[0], theirs[0]):
                    np.testing.assert_array_equal(one, two, err_msg=where)
                assert mine[1:] == theirs[1:], where
