"""Files of training states, which are written and read completely or not at all.

This package knows no trainer, only a header and parts, each with three methods::

    state()           plain data: numbers, strings, containers, arrays, schedulers, ByParameter
    problems(state)   descriptions of what does not fit; changes nothing
    assign(state)     takes over the state

Saving::

    saving.write(path, saving.header("SVRG", parameters, keys, len(devices)), parts)

Loading checks everything before it changes anything. Parts that need arrays wait until the
parameters are initialized, and are checked again then::

    saved = saving.read(path, header, saving.most_bytes(states.expected_bytes(), parameters))
    saved.check(parts, header)
    saved.assign({name: parts[name] for name in at_once})
    ...
    saved.check(parts, header)
    saved.assign({name: parts[name] for name in deferred})

Values of parameters are in a `ByParameter`, by position. The trainer that saved a file may have its
parameters in another order. So parameters are matched by name, and the positions become those of
the trainer that loads. Arrays come back as `SavedArray`, a read-only NumPy array. Objects
(schedulers, schedules) come back as `SavedObject`: `object_problems` compares one with an existing
object, and `assign_object` gives that object the attributes.

Modules: ``disk`` writes bytes. ``container`` is the current format, ``format1`` that of 0.1.0,
``pickles`` that of `gluon.Trainer`. ``raw_arrays`` reads the arrays in them, ``values`` plain data,
``objects`` attributes. ``matching`` matches parameters. ``optimizer`` has the two parts of an
optimizer. ``saved`` ties everything together. Only trainers import this package.
"""

from .disk import write_bytes
from .objects import assign as assign_object
from .objects import problems as object_problems
from .optimizer import OptimizerSettings, OptimizerStates
from .saved import NoPart, Part, Saved, header, most_bytes, read, write
from .values import ByParameter, SavedObject, by_attributes

__all__ = [
    "ByParameter",
    "NoPart",
    "OptimizerSettings",
    "OptimizerStates",
    "Part",
    "Saved",
    "SavedObject",
    "assign_object",
    "by_attributes",
    "header",
    "most_bytes",
    "object_problems",
    "read",
    "write",
    "write_bytes",
]
