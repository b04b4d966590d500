"""Training loops, with `gluon.Trainer` and with `SVRGTrainer`."""

from mxnet import autograd


def backward(closure):
    """The loss of a closure; its gradients are in the parameters."""
    with autograd.record():
        loss = closure()
    autograd.backward(loss)
    return loss


def plain_step(trainer, closure, batch_size, **kwargs):
    """One step as everybody writes it with `gluon.Trainer`."""
    loss = backward(closure)
    trainer.step(batch_size, **kwargs)
    return loss


def svrg_step(trainer, closure, batch_size, **kwargs):
    return trainer.step(batch_size, closure=closure, **kwargs)


def split_at(cuts):
    """A function that cuts an index array at fractions of its length; pieces may be empty."""

    def split(index):
        ends = [round(cut * len(index)) for cut in sorted(cuts)]
        return [index[a:b] for a, b in zip([0, *ends], [*ends, len(index)])]

    return split
