"""Running a closure at some weights, and adding up the gradients that it gives.

`estimate` holds the formula of every method, `full_pass` the mean gradient over all data; the
other modules are what these two are made of. Methods and trainers use this room; it knows neither.
"""
