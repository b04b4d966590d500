"""Trainings of which version 0.6.0 has written files: they still load."""

from kit import make
from mxnet.lr_scheduler import PolyScheduler
from problems import Dense

from gluon_svrg import Nystrom, SAGATrainer
from gluon_svrg.schedule import EverySteps, Linear

PROBLEM = Dense("regression", hidden=(2,), seed=3)
BATCHES = PROBLEM.batches(5)
OF_0_6 = {
    "svrg": lambda: {
        "settings": {"momentum": 0.9, "lr_scheduler": PolyScheduler(20, 0.1, warmup_steps=3)},
        "coefficient": Linear(0.75, 4),
    },
    "saga": lambda: {"cls": SAGATrainer, "optimizer": "adam"},
    "nystrom": lambda: {"optimizer": "nag", "settings": {}, "preconditioner": Nystrom(2)},
}


def play_0_6(name, moves, load=None):
    """A training with a refresh before step 3."""
    _, loss_of, trainer = make(PROBLEM, "float32", **OF_0_6[name]())
    schedule = EverySteps(4, 2)
    trainer.register(schedule)
    if load is not None:
        trainer.load_states(load)
    for number in moves:
        if number == 3 and name != "saga":
            trainer.update_full_grads(loss_of, BATCHES)
        row = {"batch_index": number % 5} if name == "saga" else {}
        trainer.step(5, closure=lambda: loss_of(BATCHES[number % 5]), **row)
        schedule.due(trainer)
    return trainer
