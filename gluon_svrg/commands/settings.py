"""The settings of a comparison: methods, learning rates and the rest. Needs no MXNet."""

from __future__ import annotations

import math
from typing import NamedTuple


class Method(NamedTuple):
    """How to train with a method."""

    title: str  # in tables, plots and records
    trainer: str  # of `gluon_svrg`
    refreshes: bool = False  # whether it takes full gradients
    decays: bool = False  # whether its learning rate falls to zero, like half a cosine
    has_table: bool = False  # whether its minibatches are fixed, with an index each
    draws: bool = False  # whether these are drawn with replacement after the first pass


#: The methods, by the names that users type.
METHODS = {
    "sgd": Method("plain", "SVRGTrainer"),  # which, without a snapshot, is `gluon.Trainer`
    "sgd-decay": Method("plain-decay", "SVRGTrainer", decays=True),
    "svrg": Method("SVRG", "SVRGTrainer", refreshes=True),
    "alpha-svrg": Method("alpha-SVRG", "SVRGTrainer", refreshes=True),
    "saga": Method("SAGA", "SAGATrainer", has_table=True),
    "sag": Method("SAG", "SAGTrainer", has_table=True, draws=True),
    "sarah": Method("SARAH", "SARAHTrainer", refreshes=True),
    "storm": Method("STORM", "STORMTrainer"),
    "mars": Method("MARS", "MARSTrainer"),
}
DEFAULT_METHODS = ("sgd", "sgd-decay", "svrg")

#: The first coefficient of alpha-SVRG, as in its paper; it falls linearly to 0.
FIRST_ALPHA = 0.75

#: 1e-05, 3e-05, ... 100, 300: the rates that a search may try.
LADDER = tuple(float(f"{digit}e{power}") for power in range(-5, 3) for digit in (1, 3))
#: The rates that a search tries first: 0.01 to 3.
LEARNING_RATES = LADDER[6:12]

WEIGHT_DECAY = 1e-2


class Settings(NamedTuple):
    """The settings of a comparison."""

    model: str = "linear"
    optimizer: str = "sgd"
    methods: tuple[str, ...] = DEFAULT_METHODS
    learning_rates: tuple[float, ...] | None = None  # ascending; None: the built-in ones, and more
    weight_decay: float = WEIGHT_DECAY  # times half the squared norm of all parameters
    epochs: int = 20  # of SVRG; all other methods make as many data passes
    plain_epochs: int = 1  # before these, where full gradients are taken
    batch_size: int = 16
    update_freq: int = 2
    coefficient: float = 1.0  # of SVRG
    seed: int = 0  # the first one, with which all rates are tried
    seeds: int = 3  # how many train with the best rate

    @property
    def num_snapshots(self) -> int:
        """How many full gradients SVRG takes."""
        return math.ceil(self.epochs / self.update_freq)

    @property
    def data_passes(self) -> int:
        """How many data passes each method makes: those of SVRG, all included."""
        gradients = (2 if self.coefficient else 1) * self.epochs
        return self.plain_epochs + gradients + self.num_snapshots


#: A text with more values is a name or a number of the row, and an input for each says nothing.
MOST_WORDS = 100

#: What `datasets` makes of a file.
RULES = f"""\
rules for a file (its name ends in .csv or .tsv, its text is UTF-8):
  Its first line names the columns. Columns are separated by commas, semicolons, tabs or |. With
  semicolons, 1,5 is read as 1.5. Empty cells, NA, N/A, NaN, None, null and ? are missing.
  - Rows without a target are left out. A target of many numbers and some text is refused, unless
    --task is classification.
  - A column where at least half of the cells are numbers is an input. Its other cells are missing,
    and are filled with the mean of the column.
  - Any other column is text. Each of its values is an input of 0 and 1, and "missing" is a value.
    Text with more than {MOST_WORDS} values, or with fewer rows than two for each, is left out.
    So are columns that are empty or have no name.
  - All inputs are scaled to mean 0 and variance 1, and the target of a regression is, too.
  A line on standard error says which cells, rows and columns were filled or left out."""
