"""What `gluon-svrg join` makes of what launchers tell it, and of the commands in the guides."""

import re
import shlex
from pathlib import Path

import pytest

from gluon_svrg.commands import cli, join, ranks
from gluon_svrg.commands.arguments import UserError

GUIDES = Path(__file__).parents[1] / "notebooks"
LAUNCHERS = {
    "Open MPI 4": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_MCA_ess_base_jobid": "17",
            "OMPI_MCA_orte_hnp_uri": "17.0;tcp://10.0.0.1,172.17.0.1:4711",
            "PMIX_RANK": "1",
        },
        (1, 4, "mpi-17", "10.0.0.1"),
    ),
    "Open MPI 5": (
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "2",
            "PMIX_NAMESPACE": "prterun-a-5@1",
            "PMIX_RANK": "0",
        },
        (0, 2, "mpi-prterun-a-5@1", None),
    ),
    "Open MPI inside Slurm": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_MCA_ess_base_jobid": "5",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_ID": "0",
        },
        (3, 4, "mpi-5", None),
    ),
    "srun": (
        {
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_ID": "3",
            "SLURM_JOB_ID": "7",
            "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
        },
        (1, 2, "slurm-7.3", "10.0.0.9"),
    ),
    "MPICH": ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3, "pmi", None)),
    "PMIx": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, (1, 2, "pmix-n", None)),
    "Indexed Job": ({"JOB_COMPLETION_INDEX": "1"}, (1, 2, "kubernetes", None)),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks(name):
    variables, expected = LAUNCHERS[name]
    assert ranks.find(variables, size=None if expected[1] != 2 else 2)[:4] == expected


def test_what_is_given_counts():
    variables, _ = LAUNCHERS["MPICH"]
    assert ranks.find(variables, 0, 9)[:2] == (0, 9)


def test_roles():
    def names(size, **settings):
        return join.names_for(join.Settings([], **settings), size)

    assert names(2) == [["scheduler", "server 0", "worker 0"], ["worker 1"]]
    assert names(3, servers=2)[:2] == [
        ["scheduler", "server 0", "worker 0"],
        ["server 1", "worker 1"],
    ]
    assert names(5, workers=2, servers=1) == [
        ["scheduler"],
        ["server 0"],
        ["worker 0"],
        ["worker 1"],
        [],
    ]
    with pytest.raises(UserError, match="need 4 processes; there are 3"):
        names(3, workers=2)


def guide_blocks(language):
    """What the guides show in a language, wherever it stands."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md"))]
    return [b for t in texts for b in re.findall(rf"^```{language}\n(.*?)^```$", t, re.M | re.S)]


def test_the_manifest_of_the_guide():
    """It is valid, and its command is one of ours, with sizes and addresses that fit."""
    check = pytest.importorskip("kubernetes_validate", reason="needs the schemas of Kubernetes")
    import yaml

    (text,) = (block for block in guide_blocks("yaml") if "kind: Job" in block)
    service, job = yaml.safe_load_all(text)
    for part in (service, job):
        check.validate(part, "1.30", strict=True)
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (container,) = pod["containers"]
    options = cli.parser().parse_args(container["command"][1:])
    assert options.size == job["spec"]["completions"]
    assert options.scheduler.startswith(f"{name}-0.{pod['subdomain']}:")
    assert options.script == ["--", "python", "train.py"]


def test_the_commands_of_the_guide():
    """All can be parsed, so no option is misspelled."""
    text = "\n".join(guide_blocks("bash")).replace("\\\n", " ")
    commands = [line.split("#")[0] for line in text.splitlines() if "gluon-svrg" in line]
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)
        options = cli.parser().parse_args(words[words.index("gluon-svrg") + 1 :])
        assert options.script[:3] == ["--", "python", "train.py"], command
