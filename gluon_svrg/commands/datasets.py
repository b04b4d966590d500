"""Real data sets: those of scikit-learn, and text files with a row on each line."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .settings import MOST_WORDS

BUNDLED = ("digits", "breast_cancer", "diabetes")
#: Memory is samples x classes, and the solver's time grows with the square of the classes: 2 s for
#: 1,000 classes, more than 10 minutes for 20,000.
MOST_CLASSES = 1000
#: The endings of the names of files.
FILES = (".csv", ".tsv")
#: What pandas calls columns without a name; `DataFrame.to_csv` writes row numbers into one.
NAMELESS = "Unnamed: "


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
    notes: tuple[str, ...] = ()  # what was left out of a file, or filled


class DataError(ValueError):
    """Data that cannot be used, with a message for the user."""


def load(name: str, target: str | None = None, task: str | None = None) -> Dataset:
    """Load a data set by name, or from a file.

    Parameters
    ----------
    name : str
        One of `BUNDLED`, or the path of a file whose name ends in one of `FILES`.
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
    if not name.lower().endswith(FILES):
        raise DataError(
            f"unknown data set {name!r}: choose {', '.join(BUNDLED)} or a file that ends in "
            f"{', '.join(FILES)}"
        )
    return _from_csv(Path(name), target, task)


def _bundled(name: str) -> Dataset:
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    if name == "diabetes":
        return Dataset(name, _standardized(X), _standardized(y), "regression", 0)
    X = X / 16 if name == "digits" else _standardized(X)
    return Dataset(name, X, y.astype("float64"), "classification", len(np.unique(y)))


def _from_csv(path: Path, target: str | None, task: str | None) -> Dataset:
    table, notes = _read(path), []
    names = list(table.columns)
    if target is None:
        raise DataError(f"--target is missing: name a column of {path} ({', '.join(names)})")
    if target not in names:
        raise DataError(f"{path} has no column {target!r}; its columns are {', '.join(names)}")
    unknown = int(table[target].isna().sum())
    if unknown:
        notes.append(f"rows left out, because they have no {target!r}: {unknown}")
        table = table.dropna(subset=[target])
    if len(table) < 2:
        raise DataError(f"{path} has {len(table)} rows with a value of {target!r}: too few")
    columns = (_inputs(table[name], notes) for name in names if name != target)
    inputs = [values for values in columns if values is not None]
    if not inputs:
        left = f" ({'; '.join(notes)})" if notes else ""
        raise DataError(f"{path} has no column to learn {target!r} from{left}")
    X = _standardized(np.hstack(inputs))
    y, task, classes = _outputs(table[target], task, path)
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise DataError(f"{path} holds numbers that are infinite or too large")
    return Dataset(path.stem, X, y, task, classes, tuple(notes))


def _read(path: Path) -> Any:
    """The cells of a file as text, in a table of pandas; missing ones are NaN."""
    import pandas as pd

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next((line for line in file if line.strip()), "")
        delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(header)
        _check_names(header, delimiter, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of cells without a column
            table = pd.read_csv(
                path,
                sep=delimiter,
                dtype=str,
                index_col=False,
                encoding="utf-8-sig",
                skipinitialspace=True,
                na_values=["?"],
            )
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except pd.errors.EmptyDataError:
        raise DataError(f"{path} is empty") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#x}): save it as UTF-8"
        ) from error
    except (OSError, ValueError, pd.errors.ParserWarning) as error:
        raise DataError(f"cannot read {path}: {str(error).strip()}") from error
    table.columns = [name.strip() for name in table.columns]
    table = table.apply(lambda column: column.str.strip())
    if delimiter == ";":  # where it is common, so is a decimal comma
        table = table.apply(lambda column: column.str.replace(_DECIMAL_COMMA, r"\1.\2", regex=True))
    return table


def _check_names(header: str, delimiter: str, path: Path) -> None:
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has several columns named {twice!r}: give each its own name")


def _delimiter(line: str) -> str:
    try:
        return csv.Sniffer().sniff(line, delimiters=",;\t|").delimiter
    except csv.Error:  # there is only one column
        return ","


_DECIMAL_COMMA = r"^([+-]?\d*),(\d+)$"
_PADDED = r"[+-]?0\d"


def _numbers(cells: Any) -> Any:
    """The numbers in a column of text, NaN where there are none."""
    import pandas as pd

    return pd.to_numeric(cells, errors="coerce")


def _inputs(cells: Any, notes: list[str]) -> np.ndarray | None:
    """The inputs that a column becomes, of shape (rows, inputs), or None if it is left out."""
    import pandas as pd

    if cells.name.startswith(NAMELESS):
        notes.append(f"column {cells.name!r} left out, because it has no name")
        return None
    known, numbers = cells.dropna(), _numbers(cells)
    if known.empty:
        notes.append(f"column {cells.name!r} left out, because it is empty")
        return None
    if 2 * numbers.count() >= len(known):
        words = known[numbers[known.index].isna()]
        if len(words):
            notes.append(
                f"cells of column {cells.name!r} that are no numbers, such as {words.iloc[0]!r}, "
                f"and so count as missing: {len(words)}"
            )
        missing = int(numbers.isna().sum())
        if missing:
            notes.append(f"cells of column {cells.name!r} filled with its mean: {missing}")
        return numbers.fillna(numbers.mean()).to_numpy(dtype="float64")[:, None]
    different = known.nunique()
    if different > MOST_WORDS or 2 * different > len(known):
        notes.append(
            f"column {cells.name!r} left out, because it is text with too many different values: "
            f"{different} in {len(known)} rows"
        )
        return None
    missing = len(cells) - len(known)
    if missing:
        notes.append(f"cells of column {cells.name!r} with 'missing' as their value: {missing}")
    return pd.get_dummies(cells, dummy_na=missing > 0).to_numpy(dtype="float64")


def _outputs(cells: Any, task: str | None, path: Path) -> tuple[np.ndarray, str, int]:
    """The targets, the task, and the number of classes."""
    numbers = _numbers(cells)
    is_text = numbers.isna().any() or cells.str.match(_PADDED).any()  # 007 is a label, and not 7
    labels, y = np.unique(cells if is_text else numbers, return_inverse=True)
    classes = len(labels)
    if classes == 1:
        raise DataError(
            f"the target {cells.name!r} of {path} is constant ({cells.iloc[0]}): nothing to learn"
        )
    if task is None:
        few = classes <= min(20, len(cells) // 2)
        words = cells[numbers.isna()]
        if 0 < len(words) <= len(cells) // 2 and not few:
            raise DataError(
                f"the target {cells.name!r} of {path} holds numbers, but text such as "
                f"{words.iloc[0]!r} in {len(words)} of {len(cells)} rows: mend these, or choose "
                "--task classification"
            )
        is_class = is_text or (few and bool(np.all(labels == np.floor(labels))))
        task = "classification" if is_class else "regression"
    if task == "regression":
        if numbers.isna().any():
            raise DataError(
                f"the target {cells.name!r} of {path} is not numeric: it holds "
                f"{cells[numbers.isna()].iloc[0]!r}"
            )
        return _standardized(numbers.to_numpy(dtype="float64")), task, 0
    if classes == len(cells):
        raise DataError(
            f"every row of {path} is a class of its own in {cells.name!r}: not a class label"
        )
    if classes > MOST_CLASSES:
        raise DataError(
            f"the target {cells.name!r} of {path} has {classes} classes, and compare takes at most "
            f"{MOST_CLASSES}: choose another column, or --task regression if it is a number"
        )
    return y.astype("float64"), task, classes


def _standardized(values: np.ndarray) -> np.ndarray:
    """Scale to mean 0 and variance 1; constants become 0, and too large values NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        centred = values - values.mean(axis=0)
        deviation = centred.std(axis=0)
        is_constant = deviation <= 1e-12 * np.abs(values).max(axis=0)
        scaled = np.where(is_constant, 0.0, centred / np.where(is_constant, 1.0, deviation))
        return scaled + 0 * deviation  # NaN where the deviation is too large for a number
