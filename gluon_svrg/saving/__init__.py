"""Files of training states, which are written and read completely or not at all.

This package knows no trainer, only parts, each with two methods, or three::

    state()           plain data: numbers, strings, containers, arrays, ByParameter, SavedObject
    problems(state)   descriptions of what does not fit, if anything can; changes nothing
    assign(state)     takes over the state

`StateFiles` checks what it can before it changes anything. Parts that need arrays wait until the
parameters are initialized, and are checked again. Values of parameters are in a `ByParameter`, by
position, and come back by the positions here. Arrays come back as NumPy arrays, objects
(schedulers) as `SavedObject`.
"""

from .file_format import write_bytes
from .files import StateFiles
from .objects import EpochCount, Registered, assign_object, object_problems
from .optimizer import OptimizerSettings, OptimizerStates
from .parameters import array_problems
from .values import ByParameter, SavedObject, by_attributes
