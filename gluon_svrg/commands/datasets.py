"""Real data sets: those of scikit-learn, and CSV files."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

BUNDLED = ("digits", "breast_cancer", "diabetes")
TASKS = ("classification", "regression")
#: Memory is samples x classes, and the solver's time grows with the square of the classes: 2 s for
#: 1,000 classes, more than 10 minutes for 20,000.
MOST_CLASSES = 1000


class Dataset(NamedTuple):
    """Inputs and targets, ready for a network.

    ``X`` has shape (samples, features). ``y`` has shape (samples,), and holds classes as 0, 1, ...
    or numbers with mean 0 and variance 1.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    task: str
    classes: int  # 0 for a regression


class DataError(ValueError):
    """Data that cannot be used, with a message for the user."""


def load(name: str, target: str | None = None, task: str | None = None) -> Dataset:
    """Load a data set by name, or from a CSV file.

    Parameters
    ----------
    name : str
        One of `BUNDLED`, or the path of a file that ends in ``.csv``.
    target : str, optional
        The column of the file to predict.
    task : {'classification', 'regression'}, optional
        By default it is inferred from the target: text, and whole numbers with few values, are
        classes.

    Returns
    -------
    Dataset

    Raises
    ------
    DataError
        If there is no such data, or it cannot be used.
    """
    if name in BUNDLED:
        if target is not None or task is not None:
            raise DataError(f"{name} has its own target and task: leave --target and --task out")
        return _bundled(name)
    if not name.lower().endswith(".csv"):
        raise DataError(f"unknown data set {name!r}: choose {', '.join(BUNDLED)} or a .csv file")
    return _from_csv(Path(name), target, task)


def _bundled(name: str) -> Dataset:
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    if name == "diabetes":
        return Dataset(name, _standardized(X), _standardized(y), "regression", 0)
    X = X / 16 if name == "digits" else _standardized(X)
    return Dataset(name, X, y.astype("float64"), "classification", len(np.unique(y)))


def _from_csv(path: Path, target: str | None, task: str | None) -> Dataset:
    table = _read(path)
    names = list(table.columns)
    if target is None:
        raise DataError(f"--target is missing: name a column of {path} ({', '.join(names)})")
    if target not in names:
        raise DataError(f"{path} has no column {target!r}; its columns are {', '.join(names)}")
    if len(names) < 2:
        raise DataError(f"{path} has no column beside the target {target!r}")
    labels = table.labels(target)
    if len(set(labels)) == 1:
        raise DataError(
            f"the target {target!r} of {path} is constant ({labels[0]}): nothing to learn"
        )
    task = task or _infer_task(labels)
    X = _standardized(np.array([table.numbers(name) for name in names if name != target]).T)
    if task == "regression":
        y = _standardized(table.numbers(target))
        classes = 0
    else:
        words, y = np.unique(labels, return_inverse=True)
        classes = len(words)
        if classes == len(labels):
            raise DataError(
                f"every row of {path} is a class of its own in {target!r}: not a class label"
            )
        if classes > MOST_CLASSES:
            raise DataError(
                f"the target {target!r} of {path} has {classes} classes, and compare takes at most "
                f"{MOST_CLASSES}: choose another column, or --task regression if it is a number"
            )
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise DataError(f"{path} holds numbers that are too large")
    return Dataset(path.stem, X, y.astype("float64"), task, classes)


class _Table(NamedTuple):
    """The cells of a CSV file, as text."""

    path: Path
    lines: list[int]  # the line of each row in the file
    columns: dict[str, list[str]]

    def cells(self, name: str) -> list[str]:
        """A column without missing values."""
        cells = self.columns[name]
        missing = [cell.lower() in ("", "nan", "na", "null") for cell in cells]
        if all(missing):
            raise DataError(f"the column {name!r} of {self.path} is empty")
        if any(missing):
            line = self.lines[missing.index(True)]
            raise DataError(f"the column {name!r} of {self.path} has no value in line {line}")
        return cells

    def numbers(self, name: str) -> np.ndarray:
        """A column of finite numbers."""
        values = [_number(cell) for cell in self.cells(name)]
        if None in values:
            row = values.index(None)
            raise DataError(
                f"the column {name!r} of {self.path} is not numeric: line {self.lines[row]} holds "
                f"{self.columns[name][row]!r}"
            )
        return np.array(values)

    def labels(self, name: str) -> list[str]:
        """A column of words or numbers, with equal numbers in the same form.

        If a cell is in no form of a number, such as 007, all are words: 007 is not 7.
        """
        cells = self.cells(name)
        if any(_number(cell) is None or _PADDED.match(cell) for cell in cells):
            return cells
        return [_canonical(cell) for cell in cells]


def _read(path: Path) -> _Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            numbered = [(reader.line_num, row) for row in reader if row]
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not numbered:
        raise DataError(f"{path} is empty")
    names = [name.strip() for name in numbered.pop(0)[1]]
    if len(set(names)) < len(names) or not all(names):
        raise DataError(f"{path} needs a first line with a different name for each column")
    if len(numbered) < 2:
        raise DataError(f"{path} has {len(numbered)} rows of data: too few")
    for line, row in numbered:
        if len(row) != len(names):
            raise DataError(f"line {line} of {path} has {len(row)} cells, expected {len(names)}")
    columns = zip(*(row for _, row in numbered))
    cells = {name: [cell.strip() for cell in column] for name, column in zip(names, columns)}
    return _Table(path, [line for line, _ in numbered], cells)


_PADDED = re.compile(r"[+-]?0\d")
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?$")


def _canonical(cell: str) -> str:
    """The canonical form of a number; exact for whole numbers of any length."""
    if _WHOLE.match(cell):
        return str(int(cell.partition(".")[0]))
    return f"{float(cell):.17g}"


def _number(cell: str) -> float | None:
    if "_" in cell:  # only Python accepts it in numbers
        return None
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _infer_task(labels: list[str]) -> str:
    if any(_number(label) is None or _PADDED.match(label) for label in labels):
        return "classification"
    values = [_number(label) for label in labels]
    few = len(set(labels)) <= min(20, len(labels) // 2)
    whole = all(value == int(value) for value in values if value is not None)
    return "classification" if few and whole else "regression"


def _standardized(values: np.ndarray) -> np.ndarray:
    """Scale to mean 0 and variance 1; constants become 0, and too large values NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        centred = values - values.mean(axis=0)
        deviation = centred.std(axis=0)
        is_constant = deviation <= 1e-12 * np.abs(values).max(axis=0)
        return centred / np.where(is_constant, 1.0, deviation) + 0 * deviation
