"""Parameters that a closure reads but that are not the trainer's.

Another trainer may optimize them, and statistics of BatchNorm may belong to none. A pass at other
weights must not change them.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Iterable, Iterator

from mxnet.gluon import Parameter

from .. import _mxnet
from .columns import copy_rows, pieces


class ExternalParameters:
    """Parameters that closures read, and that this trainer does not own.

    They are looked for in the first pass that must not change them, at the first mini-batch of each
    refresh, and where curvature or variance are measured.
    """

    def __init__(self, inside: Iterable[Parameter]) -> None:
        self._inside = set(inside)
        self._found: dict[Parameter, None] = {}
        self._is_searched = False
        self.may_move = True  # whether there are such parameters, or nobody has looked yet

    def fingerprint(self) -> int:
        """A checksum of the weights that only others change; 0 without any. Waits for them."""
        checksum = 0
        fixed = (p for p in self._found if not _mxnet.is_auxiliary(p))
        arrays = chain.from_iterable(map(_mxnet.data, fixed))
        for piece in chain.from_iterable(map(pieces, arrays)):
            checksum = zlib.crc32(piece.tobytes(), checksum)
        return checksum

    @contextmanager
    def protected(self, *, gradients: bool = False, search: bool = False) -> Iterator[None]:
        """Restore their states at the end of a block, and gradients that add up, or all of them."""
        with ExitStack() as stack:

            def protect(parameter: Parameter) -> None:
                values = _mxnet.data(parameter)
                if _mxnet.is_auxiliary(parameter):  # operators write to copies meanwhile
                    stack.callback(_mxnet.put, [parameter], [values])
                    _mxnet.put([parameter], [[value.copy() for value in values]])
                elif parameter.grad_req == "add" or (gradients and _mxnet.is_trainable(parameter)):
                    now = _mxnet.gradients(parameter)
                    stack.callback(_mxnet.mark, [values], _mxnet.fresh([values]))
                    stack.callback(_mxnet.take_fresh, [values])
                    stack.callback(copy_rows, [[grad.copy() for grad in now]], [now])

            def note(parameter: Parameter) -> None:
                if parameter not in self._inside and parameter not in self._found:
                    self._found[parameter] = None
                    protect(parameter)

            for parameter in self._found:
                protect(parameter)
            search = search or not self._is_searched
            with _mxnet.reads_noted(note) if search else nullcontext():
                yield
            self._is_searched, self.may_move = True, bool(self._found)
