"""Running a closure at given weights, and summing its gradients.

`estimate` has the formula of every method, `full_pass` the mean gradient over all data; the other
modules support these two. Methods and trainers use this package; it knows neither.
"""
