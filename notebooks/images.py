"""Images for the notebooks: from a local MNIST or CIFAR-10 folder, or digits without one."""

import gzip
import os
from pathlib import Path

import numpy as np

MNIST = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
CIFAR10 = tuple(f"data_batch_{number}.bin" for number in range(1, 6))


def load(samples=2000, folder=None):
    """Load images and labels; nothing is ever downloaded.

    Parameters
    ----------
    samples : int
        At most so many, the first ones.
    folder : str, optional
        Where the files of MNIST (``train-images-idx3-ubyte.gz`` and so on) or of the binary
        version of CIFAR-10 (``data_batch_1.bin`` and so on) lie, as `gluon.data.vision` keeps
        them. By default ``GLUON_SVRG_DATA`` of the environment.

    Returns
    -------
    X : numpy.ndarray
        float32, from 0 to 1, of shape (samples, channels, height, width).
    y : numpy.ndarray
        The labels, 0 to 9.
    name : str
        Which data these are.

    Raises
    ------
    FileNotFoundError
        If a folder is named that holds neither.
    """
    folder = folder or os.environ.get("GLUON_SVRG_DATA")
    if not folder:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        X = (pixels.reshape(-1, 1, 8, 8) / 16).astype("float32")
        return X[:samples], labels[:samples], "digits"
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
    return (X[:samples] / 255).astype("float32"), y[:samples].astype("int64"), name


def _all_in(folder, names):
    return all(Path(folder, name).is_file() for name in names)
