"""The program of the scheduler and the servers: ``python -m gluon_svrg.commands.idle``.

``import mxnet`` alone would be enough, but it does not return there, so no watch could run.
"""

from __future__ import annotations

import os

from ..stores.launcher import tell
from ..stores.watch import watch


def main() -> None:
    """Run the role that ``DMLC_ROLE`` names, until the job ends."""
    role = os.environ.pop("DMLC_ROLE")  # otherwise MXNet would run it inside its import
    from .._mxnet import heartbeats

    os.environ["DMLC_ROLE"] = role
    workers, servers = (int(os.environ[f"DMLC_NUM_{name}"]) for name in ("WORKER", "SERVER"))
    nodes = {heartbeats.SCHEDULER: "the scheduler"}
    if role == "scheduler":
        nodes = {heartbeats.server(rank): f"server {rank}" for rank in range(servers)}
        nodes.update({heartbeats.worker(rank): f"worker {rank}" for rank in range(workers)})

    heartbeats.run_role(lambda store: watch(store, nodes))
    tell("end", "")


if __name__ == "__main__":
    main()
