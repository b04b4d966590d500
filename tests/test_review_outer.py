"""Defects that a review of files, kvstores and commands has found, and what replaced machinery."""

import threading

from mxnet import gluon
from problems import Dense

from gluon_svrg import SVRGTrainer

DEADLINE = 60  # seconds, for what takes one


def test_refreshes_of_two_threads_look_for_parameters_in_turns():
    """Both patch a method of Gluon, which is itself again when both are done."""
    read = gluon.Parameter._check_and_get
    problem = Dense("regression", hidden=(4,), samples=12, seed=38)
    first_is_in, second_is_in, errors = threading.Event(), threading.Event(), []

    def first_looks():
        first_is_in.set()
        assert not second_is_in.wait(0.5)

    def second_looks():
        assert gluon.Parameter._check_and_get is not read
        second_is_in.set()

    def refresh(look):
        net = problem.network()
        loss_of, calls = problem.closure(net), []
        trainer = SVRGTrainer(net[1].collect_params(), "sgd", lock_random=False)

        def closure(index):
            loss = loss_of(index)
            if not calls:
                look()
            calls.append(index)
            return loss

        try:
            trainer.update_full_grads(closure, problem.batches(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=refresh, args=(first_looks,))]
    threads[0].start()
    assert first_is_in.wait(DEADLINE)
    threads.append(threading.Thread(target=refresh, args=(second_looks,)))
    threads[1].start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not errors and second_is_in.is_set()
    assert gluon.Parameter._check_and_get is read
