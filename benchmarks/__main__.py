"""``python -m benchmarks NAME``: measure, print a table, write JSON, and plot."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import (
    convergence,
    distributed,
    family,
    forms,
    memory,
    overhead,
    pays,
    record,
    scaling,
    start,
)

BENCHMARKS = {
    "overhead": overhead,
    "memory": memory,
    "scaling": scaling,
    "distributed": distributed,
    "family": family,
    "forms": forms,
    "convergence": convergence,
    "start": start,
    "pays": pays,
}


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="a saved run of the same name")
    parser.add_argument(
        "--no-peers",
        action="store_true",
        help="convergence: leave out other packages, which are installed into OUTPUT/.venv-peers",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FOLDER",
        help="overhead: measure another version as well, whose gluon_svrg is in this folder "
        "(git archive COMMIT | tar x -C FOLDER)",
    )
    options = parser.parse_args()
    benchmark = BENCHMARKS[options.name]
    saved = None
    if options.compare is not None:
        try:
            saved = record.load(options.compare, options.name)
            saved_rows = benchmark.table(saved["records"])
        except (OSError, ValueError) as error:
            parser.error(f"--compare: {error}")
        except (KeyError, TypeError):
            parser.error(f"--compare: {options.compare} was written by another version")
    options.output.mkdir(parents=True, exist_ok=True)

    settings: dict = {}
    if benchmark is overhead:
        settings["baseline"] = options.baseline
    if benchmark is convergence and not (options.quick or options.no_peers):
        settings["peers"] = options.output.absolute() / ".venv-peers"
    run = record.of(options.name, benchmark.run(quick=options.quick, **settings), options.quick)
    path = record.save(run, options.output)
    rows = benchmark.table(run["records"])
    print(record.as_text(rows))
    if benchmark is distributed:
        print(f"\n{distributed.as_text(run['records'])}")
    if benchmark is pays:
        print(f"\n{record.as_text(pays.by_ratio(run['records']))}")
    if saved is not None:
        print(f"\ndivided by {options.compare} (MXNet {saved['versions']['mxnet']}):\n")
        print(record.as_text(record.divide(rows, saved_rows)))
    figures = benchmark.plot(run["records"])
    pictures = []
    for name, figure in figures.items() if isinstance(figures, dict) else [("", figures)]:
        pictures.append(path.with_name(f"{path.stem}{name and '-' + name}.png"))
        figure.savefig(pictures[-1], dpi=120)
    print(f"\nwrote {' and '.join(map(str, [path, *pictures]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
