"""Running a closure at given weights, and summing its gradients.

`estimate` has the formula of every method, `full_pass` the mean gradient over all data; the other
modules support these two. `method` is the base of all methods, and `pending_update` holds what a
step has computed until the weights move.
"""
