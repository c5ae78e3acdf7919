"""A run's checkpoints, and the model of one, as commands: list, export, merge."""

import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from smolcluster.configs.begun import check_workload
from smolcluster.configs.function_name import known_here
from smolcluster.configs.resolve import load_resolved
from smolcluster.errors import ConfigError
from smolcluster.launch.find import find
from smolcluster.launch.language_model import gpt_config, saved_model
from smolcluster.launch.saved import store_of
from smolcluster.models.gpt2_weights import write_gpt2
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.launched import launched_of
from smolcluster.runs.paths import RunPaths
from smolcluster.training.checkpoint import BEST, LATEST, CheckpointInfo, evaluated, export
from smolcluster.training.merging import write_adapters, write_merged
from smolcluster.training.named import load_named
from smolcluster.training.pretrained import Pretrained
from smolcluster.utils.units import format_bytes
from smolcluster.utils.words import as_command, write_json


def show_checkpoints(run: str, *, as_json: bool = False) -> int:
    """Print a line for each checkpoint of a run; 1 when one is damaged.

    `as_json`: print a list instead, oldest first, of `{step, train_loss, val_loss, size_bytes, written_at,
    problem, names, path}`. Null is what a damaged one does not tell, and the `problem` of a good one; `names`
    are latest, best, both or none.
    """
    paths = find(run)
    infos = store_of(paths).list()
    named = {name: (paths.checkpoints / name).resolve() for name in (LATEST, BEST)}

    def names_of(info: CheckpointInfo) -> list[str]:
        return [name for name, path in named.items() if path == info.path.resolve()]

    if as_json:
        lines = [_values(info, names_of(info)) for info in infos]
        write_json(lines)
        return int(any(info.problem for info in infos))
    console = SteadyConsole()
    table = Table("step", "train loss", "val loss", "size", "written (UTC)", "state")
    for info in infos:
        table.add_row(*_row(info, names_of(info)))
    console.print(table if infos else f"run {paths.run_id} has no checkpoint {_where(paths)}")
    for info in infos:
        if info.problem:
            console.print(Text(f"step {info.step:,}: {info.problem}"), soft_wrap=True)
    return int(any(info.problem for info in infos))


def _where(paths: RunPaths) -> str:
    launched = launched_of(paths)
    if launched is None or launched.server.ssh is None:
        return "yet"
    node = launched.server.node
    return f"here; they are on {node}: {as_command('fetch', paths.run_id)} brings them"


def export_model(
    run: str, folder: Path, *, best: bool, transformers: bool, workload: str | None = None
) -> int:
    """Write a run's `model.safetensors`, the newest good one or the best one, into a folder.

    With `transformers` it is a GPT, or what was trained of a `Pretrained` model, in the format of the library
    of that name; adapters in that of peft; with the weights that the run evaluates. `workload`: see
    `pretrained_of`.

    Raises:
        CheckpointError: there is none, or it cannot be written.
        ConfigError: it is neither, but ought to be.
    """
    paths, checkpoint = saved_model(run, best=best)
    target = folder
    if not transformers:
        target = export(checkpoint, folder)
    elif load_resolved(paths.config).train.workload is None:
        write_gpt2(evaluated(checkpoint), gpt_config(paths), folder)
    else:
        model = pretrained_of(paths, workload)
        write = write_merged if model.lora is None else write_adapters
        write(model, evaluated(checkpoint), folder)
    sys.stdout.write(f"step {checkpoint.state.step} of run {paths.run_id} -> {target}\n")
    if checkpoint.state.base is not None and not transformers:
        sys.stdout.write(
            f"these are adapters without their base, {checkpoint.state.base}: put them on it with "
            "load_state_dict(..., strict=False)\n"
        )
    return 0


def merge_model(run: str, folder: Path, *, best: bool, workload: str | None = None) -> int:
    """Write the model that a run fine-tuned, its adapters merged into the base, into a folder.

    `workload`: see `pretrained_of`.

    Raises:
        CheckpointError: there is no checkpoint, or the folder is not empty or cannot be written.
        ConfigError: the run trained no `Pretrained` model.
    """
    paths, checkpoint = saved_model(run, best=best)
    model = pretrained_of(paths, workload)
    write_merged(model, evaluated(checkpoint), folder)
    sys.stdout.write(
        f"step {checkpoint.state.step} of run {paths.run_id}, merged into {model.folder} -> {folder}\n"
    )
    return 0


def pretrained_of(paths: RunPaths, workload: str | None = None) -> Pretrained:
    """The model of a folder that a run fine-tuned.

    `workload`: the function that makes it, as the user names it now; None: the run's, if it is known here.

    Raises:
        ConfigError: it trained another one, or its workload was not trained on this machine.
    """
    settings = load_resolved(paths.config)
    train = settings.train
    if train.workload is not None:
        if workload is None:
            check_workload(paths.root, train)
        name = known_here(workload or train.workload).text
        maker = load_named(name, train.workload_args, settings.cluster.seed).maker
        if isinstance(maker, Pretrained):
            return maker
    raise ConfigError(
        f"run {paths.run_id} trained {train.workload_label or train.model.type}, whose model is no "
        f"Pretrained(folder): only such a one has a base to merge into; {as_command('export')} writes its "
        "weights"
    )


def _values(info: CheckpointInfo, names: list[str]) -> dict[str, object]:
    return {
        "step": info.step,
        "train_loss": info.train_loss,
        "val_loss": info.val_loss,
        "size_bytes": info.nbytes,
        "written_at": info.written_at,
        "problem": info.problem,
        "names": names,
        "path": str(info.path),
    }


def _row(info: CheckpointInfo, names: list[str]) -> list[str | Text]:
    def loss(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    state = Text("damaged", "red") if info.problem else Text("good", "green")
    state.append("".join(f", {name}" for name in names), "")
    written = (info.written_at or "").replace("T", " ")[:19]
    size = format_bytes(info.nbytes)
    return [f"{info.step:,}", loss(info.train_loss), loss(info.val_loss), size, written, state]
