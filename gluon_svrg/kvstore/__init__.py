"""The exchange of weights, gradients and numbers between devices and workers.

Parameter servers unpickle `server_optimizer` inside ``import mxnet``: it imports nothing of Gluon,
and so this file imports nothing.
"""
