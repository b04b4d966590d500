"""The methods: one file for each, with the formula of its paper.

`interface` defines a method; `table` keeps the gradients of minibatches. A method decides what is
added to a minibatch's gradient, and `passes.estimate` adds it. Only the trainers use this package,
and they know methods only by their interface.
"""
