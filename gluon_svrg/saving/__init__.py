"""Files of training states: written whole or not at all, read whole or not at all.

No trainer is seen here. A trainer is a header and parts, each with three methods::

    state()           plain data: numbers, strings, containers, arrays, schedulers, ByParameter
    problems(state)   what does not fit, in words; changes nothing
    assign(state)     takes it over

Saving::

    saving.write(path, saving.header("SVRG", parameters, keys, len(devices)), parts)

Loading. Everything is checked before anything is changed; what needs arrays waits until the
parameters are initialized, and is checked again then::

    saved = saving.read(path, header, saving.most_bytes(states.expected_bytes(), parameters))
    saved.check(parts, header)
    saved.assign({name: parts[name] for name in at_once})
    ...
    saved.check(parts, header)
    saved.assign({name: parts[name] for name in deferred})

What belongs to parameters stands in a `ByParameter`, by position. A file can be of a trainer with
another order of its parameters, so these are matched by name, and the positions become those of
the trainer that loads. Arrays come back as `SavedArray`, which is a read-only array of NumPy;
objects (schedulers, schedules) as `SavedObject`: `object_problems` compares one with an object that
is there, `assign_object` gives it the attributes.

Modules: ``disk`` writes bytes; ``container`` is the format of today, ``format1`` that of 0.1.0,
``pickles`` that of `gluon.Trainer`; ``raw_arrays`` are the arrays in them; ``values`` is plain
data; ``objects`` are attributes; ``matching`` finds parameters; ``optimizer`` has the two parts of
an optimizer; ``saved`` ties them together. Only trainers import from here.
"""

from .disk import write_bytes
from .objects import assign as assign_object
from .objects import problems as object_problems
from .objects import restored
from .optimizer import OptimizerSettings, OptimizerStates
from .saved import Part, Saved, header, most_bytes, read, write
from .values import ByParameter, SavedArray, SavedObject, by_attributes

__all__ = [
    "ByParameter",
    "OptimizerSettings",
    "OptimizerStates",
    "Part",
    "Saved",
    "SavedArray",
    "SavedObject",
    "assign_object",
    "by_attributes",
    "header",
    "most_bytes",
    "object_problems",
    "read",
    "restored",
    "write",
    "write_bytes",
]
