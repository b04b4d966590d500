"""The exchange of weights, gradients and numbers between devices and workers.

`kvstore_trainer` is a `gluon.Trainer` whose kvstore is ready before the first pass. `workers`
defines what workers of every kind can do, `kinds` knows which kvstore has which workers.
`server_optimizer` runs on parameter servers, which unpickle it inside ``import mxnet``: it imports
nothing of Gluon, and so this file imports nothing.
"""
