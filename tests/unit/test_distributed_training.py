"""The flags of `python -m smolcluster.distributed_training`, and which ranks it is."""

import socket
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import smolcluster
from smolcluster import distributed_training
from smolcluster.algorithms.children import spawned
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.ranks import place_here, ranks_of
from smolcluster.configs.schema import MeshSizes, ProfileConfig
from smolcluster.distributed_training import configuration, overrides_of, parser
from smolcluster.errors import ConfigError, LaunchError

RANK_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
    "KUBERNETES_SERVICE_HOST",
)
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
}
"""In a job of Slurm, whose script is a process as well."""
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
CONFIGS = Path(smolcluster.__file__).parent / "configs"


@pytest.mark.parametrize(
    ("environ", "flags", "here", "is_process"),
    [
        ({}, {"world_size": 4}, range(4), False),
        ({}, {}, range(1), True),
        ({}, {"world_size": 8, "rank": 3}, range(3, 4), True),
        ({}, {"world_size": 8, "rank": 4, "num_here": 4}, range(4, 8), False),
        ({"RANK": "5", "WORLD_SIZE": "8"}, {"rank": 4, "num_here": 4}, range(5, 6), True),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, {}, range(2, 3), True),
        ({"SLURM_PROCID": "2"}, {"world_size": 4}, range(2, 3), True),
        (MPIRUN, {}, range(2, 3), True),
        ({"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2"}, {}, range(2, 3), True),
        ({"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "1"}, {"num_here": 2}, range(2, 4), False),
        ({"WORLD_SIZE": "4", "HOSTNAME": "train-3", **POD}, {}, range(3, 4), True),
        ({"WORLD_SIZE": "4"}, {"rank": 3}, range(3, 4), True),
        ({"WORLD_SIZE": "1"}, {}, range(1), True),
    ],
)
def test_which_ranks_a_command_is(
    environ: Mapping[str, str], flags: dict[str, int], here: range, is_process: bool
) -> None:
    ranks = ranks_of(environ, **flags)  # type: ignore[arg-type]
    assert (ranks.here, ranks.is_process) == (here, is_process)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "3"}, (3, 1)),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4"}, (3, 4)),
        (MPIRUN, (1, 2)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
    ],
)
def test_which_rank_of_its_machine_a_process_is(
    environ: Mapping[str, str], place: tuple[int, int]
) -> None:
    assert place_here(environ) == place


def test_where_rank_0_is() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    ranks = ranks_of(environ)
    assert (ranks.address, ranks.port) == ("node1", 4000)
    assert ranks_of({}, world_size=2).port is None
    assert ranks_of({}, world_size=2, rank=0).port == 29500


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_name_that_nobody_knows_is_one_line_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("smolcluster.distributed_training.RESOLVE_S", 0.0)
    for name in RANK_NAMES:
        monkeypatch.delenv(name, raising=False)
    words = ["--world-size", "16", "--rank", "8", "--master-addr", "node1-ip"]
    with pytest.raises(ConfigError, match=r"--master-addr is node1-ip, which is no .* known name"):
        distributed_training._run(parser().parse_args(words))
    assert capfd.readouterr().err == ""


def test_the_sequence_s_length_has_two_names() -> None:
    for name in ("--seq-len", "--max-seq-length"):
        said = overrides_of(parser().parse_args([name, "64"]), 1)
        assert said == ["model.max_seq_len=64"]


def test_flags_say_where_rank_0_is_before_the_environment() -> None:
    stated = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for environ in ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, stated):
        ranks = ranks_of(environ, address="node2", port=5000)
        assert (ranks.address, ranks.port) == ("node2", 5000)


def test_flags_do_not_lead_away_from_torchruns_store() -> None:
    ranks = ranks_of(TORCHRUN, address="node1", port=4000)
    assert (ranks.address, ranks.port) == ("node1", 4000)
    with pytest.raises(ConfigError, match=r"--master-addr is node2, but torchrun .* at node1"):
        ranks_of(TORCHRUN, address="node2")
    with pytest.raises(ConfigError, match=r"--master-port is 5000, but torchrun .* at 4000"):
        ranks_of(TORCHRUN, port=5000)


@pytest.mark.parametrize(
    ("environ", "flags", "told"),
    [
        ({"RANK": "1"}, {}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE is 4, but nothing says which rank .*--rank"),
        ({"WORLD_SIZE": "4", "HOSTNAME": "train-3"}, {}, "nothing says which rank"),
        ({"WORLD_SIZE": "4", "HOSTNAME": "train-x7k2p", **POD}, {}, "completionMode: Indexed"),
        ({"WORLD_SIZE": "4", "HOSTNAME": "train-24567", **POD}, {}, "completions: 4"),
        ({"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "4"}, {}, "not within 0 to 3"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK is 'x'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"world_size": 4}, "--world-size is 4"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "4"},
            {},
            "SLURM_NTASKS is 4, but WORLD_SIZE 1",
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
            {},
            "MASTER_ADDR is localhost, but ranks are on 2 nodes",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            {},
            "GROUP_WORLD_SIZE",
        ),
        ({}, {"world_size": 4, "rank": 4}, "ranks 4 to 4 are not within 0 to 3"),
        ({}, {"world_size": 4, "rank": 2, "num_here": 3}, "ranks 2 to 4"),
        ({}, {"world_size": 0}, "--world-size is 0, must be a whole number above 0"),
        ({}, {"world_size": -4}, "--world-size is -4"),
        ({"WORLD_SIZE": "0"}, {}, "WORLD_SIZE is 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, {}, "WORLD_SIZE is 0"),
        ({}, {"world_size": 2, "rank": 1, "num_here": 0}, "--nproc-per-node is 0"),
        ({}, {"world_size": 2, "rank": 1, "port": 99999}, "--master-port is 99999, must be"),
        ({}, {"world_size": 2, "port": 0}, "--master-port is 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, {}, "MASTER_PORT is 0"),
    ],
)
def test_ranks_that_cannot_be(environ: Mapping[str, str], flags: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ranks_of(environ, **flags)  # type: ignore[arg-type]


def test_flags_become_the_mesh_and_the_configuration() -> None:
    words = "--world-size 8 --tp 2 --hidden-size 64 --batch-size 4 --gradient-clip-norm 0.5"
    flags = ("--mixed-precision", "--no-nccl", "--use-gradient-checkpointing")
    args = parser().parse_args([*words.split(), *flags])
    config = configuration(args, 8).of(MeshConfig)
    assert config.mesh == MeshSizes(dp=4, tp=2)
    assert (config.backend, config.activation_checkpointing) == ("gloo", "full")
    assert overrides_of(args, 4) == [
        "model.model_dim=64",
        "gradient_clipping.max_norm=0.5",
        "precision=bf16",
        "model.ff_dim=256",
        "batch_size=4",
        "global_batch_size=16",
    ]


@pytest.mark.parametrize("told", [(), ("--cluster", "mesh")])
def test_what_ranks_share_and_whether_they_are_compiled_and_profiled_are_flags(
    told: tuple[str, ...],
) -> None:
    flags = ("--sequence-parallel", "--loss-parallel", "--compile", "--profile")
    for said in (flags, ()):
        settings = configuration(parser().parse_args([*told, "--tp", "2", *said]), 2)
        config, is_said = settings.of(MeshConfig), bool(said)
        shared = (config.mesh.sequence_parallel, config.mesh.loss_parallel)
        assert (*shared, config.compile, config.profile is not None) == (is_said,) * 4


def test_the_profile_of_a_cluster_file_is_kept_by_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    said = "profile: {wait: 10, active: 5}\n"
    file.write_text((CONFIGS / "cluster_config_mesh.yaml").read_text() + said)
    settings = configuration(parser().parse_args(["--cluster", str(file), "--profile"]), 8)
    assert settings.of(MeshConfig).profile == ProfileConfig(wait=10, warmup=1, active=5)


@pytest.mark.parametrize("told", [(), ("--cluster", "mesh")])
def test_no_time_at_all_is_refused_as_what_no_rank_may_be_silent_for(told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="hang_timeout_s"):
        configuration(parser().parse_args([*told, "--hang-timeout", "0"]), 8)


def test_torchrun_takes_no_flag_for_an_abbreviation_of_its_own() -> None:
    theirs = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    claimed = {flag for flag in ours - theirs if any(each.startswith(flag) for each in theirs)}
    assert not claimed


@pytest.mark.parametrize(
    ("codes", "code"), [((78, 78), 78), ((75, 78), 78), ((72, 3), 3), ((2, 2), 2), ((1, 70), 1)]
)
def test_ranks_that_say_what_to_change_end_their_parent_with_the_same_code(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], code: int
) -> None:
    def rank_of(_body: object, _needs: str, environ: Mapping[str, str], **_: object) -> BaseProcess:
        return spawned(partial(sys.exit, codes[int(environ["RANK"])]), "")

    monkeypatch.setattr("smolcluster.algorithms.children.spawned", rank_of)
    with pytest.raises(LaunchError, match="failed first") as caught:
        distributed_training._start(ranks_of({}, world_size=2, port=1), parser().parse_args([]))
    assert caught.value.exit_code == code


def test_a_wrong_key_is_said_before_any_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        pytest.fail("ranks were started")

    monkeypatch.setattr(distributed_training, "_start", start)
    for name in RANK_NAMES:
        monkeypatch.delenv(name, raising=False)
    words = ["--world-size", "2", "--override", "num_epoch=2"]
    with pytest.raises(ConfigError, match="num_epoch"):
        distributed_training._run(parser().parse_args(words))
