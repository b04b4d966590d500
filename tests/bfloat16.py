"""A network in bfloat16, trained from end to end; prints the first and last loss and the scale."""

import mxnet as mx
from mxnet import gluon
from mxnet.contrib import amp
from sklearn.datasets import load_digits

from gluon_svrg import SVRGTrainer

amp.init("bfloat16")
mx.random.seed(0)
pixels, labels = load_digits(return_X_y=True)
data = gluon.data.ArrayDataset((pixels / 16).astype("float32"), labels.astype("float32"))
loader = gluon.data.DataLoader(data, batch_size=64, shuffle=True)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
amp.init_trainer(trainer)


def loss_of(X, y):
    return loss_function(net(X), y)


losses = []
for _ in range(4):
    losses.append(trainer.update_full_grads(loss_of, loader))
    for X, y in loader:
        trainer.step(len(X), closure=lambda: loss_of(X, y))
print(losses[0], losses[-1], trainer._amp_loss_scaler.loss_scale)
