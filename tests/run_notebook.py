"""Executes a notebook, in a process of its own: ``run_notebook.py NOTEBOOK FOLDER RESULT``.

Also how the outputs that are kept are made: ``run_notebook.py NOTEBOOK``, with MXNet 1.9.1. That is
the full run, of up to ten minutes on an idle core; tests make short ones.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # small operators: more threads only wait for each other
    "PYTHONWARNINGS": "ignore",  # MXNet's own, at import
    "MXNET_SUBGRAPH_VERBOSE": "0",
}
SECONDS_PER_CELL = 300  # more than needed: other jobs may share the cores


def execute(path, folder, result, full=False):
    """Run all cells in a kernel of its own; the first error ends it and is raised."""
    for module in path.parent.glob("*.py"):
        shutil.copy(module, folder)
    notebook = nbformat.read(str(path), as_version=4)
    # No kernel specification of the user's, which might name another interpreter.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    settings = {"timeout": None if full else SECONDS_PER_CELL, "record_timing": False}
    settings["resources"] = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=manager, **settings)
    client.execute(env={**os.environ, **ENVIRONMENT, "GLUON_SVRG_FULL": "1" if full else "0"})
    notebook.metadata["language_info"] = {"name": "python"}  # without its version
    nbformat.write(notebook, str(result))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        with tempfile.TemporaryDirectory() as temporary:
            execute(Path(sys.argv[1]), Path(temporary), Path(sys.argv[1]), full=True)
    else:
        execute(*map(Path, sys.argv[1:]))
