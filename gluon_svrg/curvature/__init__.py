"""Curvature: the preconditioner, and the learning rate and momentum that follow from it.

`nystrom` has the matrix P, `probe` what is measured with mini-batches, `step_size` the controller,
and `proximal` penalties in the metric of P: all four in NumPy, but for users' operators.
`direction` applies P on the device, or with penalties on the host, where `threads` keeps a step to
one thread. `preconditioner` connects all of them to the parameters of a trainer.
"""
