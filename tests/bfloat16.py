"""A network in bfloat16, trained from end to end; prints the first and last loss and the scale."""

import kit
from mxnet.contrib import amp
from problems import Dense

amp.init("bfloat16")
problem, losses = Dense("regression", hidden=(32,), samples=64), []
_, loss_of, trainer = kit.make(problem, "float32", rate=0.05)
amp.init_trainer(trainer)
for _ in range(5):
    losses.append(trainer.update_full_grads(loss_of, problem.batches(16)))
    kit.one_epoch(trainer, loss_of, problem.batches(16))
print(losses[0], losses[-1], trainer._amp_loss_scaler.loss_scale)
