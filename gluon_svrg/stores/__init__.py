"""What exchanges weights, gradients and numbers between devices and workers.

`kvstore_trainer` is a `gluon.Trainer` whose kvstore is ready before the first pass; `workers` are
the processes of a distributed kvstore; `server` is what runs on its servers. The trainers import
this room. `server` imports nothing of Gluon, for servers unpickle it inside ``import mxnet``; so
this file imports nothing.
"""
