"""The methods: one file for each, with the formula of its paper.

`interface` says what a method is; `table` keeps the gradients of minibatches. A method decides
what is added to a minibatch's gradient, `passes.estimate` adds it, and the trainers, which are
the only users of this room, know methods by their interface alone.
"""
