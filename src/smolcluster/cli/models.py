"""Commands about one model: train, checkpoints, export, generate."""

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import (
    Json,
    NumSteps,
    Overrides,
    Run,
    TrustedWorkload,
    Workload,
    below,
    below_training,
    stated_keys,
)

app = typer.Typer(rich_markup_mode=None)

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", metavar="N", min=0, help="Tokens to write.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="0 takes the likeliest token each time.")
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="N", min=1, help="Choose among the N likeliest.  [default: all]"
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")]


@app.command(
    "train",
    epilog=below_training(
        "smolcluster train                         digits, a minute",
        "smolcluster train --config gpt --override training.epochs=5",
        "smolcluster train --num-steps 100",
        "smolcluster train --workload my_project/train.py:workload --override workload_args.width=64",
        "smolcluster train --resume latest",
    ),
)
def _train(
    *,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Training file or shipped name.  [default: as a launch's; with --resume the run's own]",
        ),
    ] = None,
    default_config: Annotated[str, typer.Option("--default-config", hidden=True)] = "digits",
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run.  [default: from the time]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with a run: its name or folder, latest, or auto."
        ),
    ] = None,
    workload: Workload = None,
    num_steps: NumSteps = None,
    override: Overrides = None,
) -> int:
    """Train in this single process: the baseline that a cluster is compared with."""
    from smolcluster.configs.meant import training_source  # noqa: PLC0415 - takes time
    from smolcluster.configs.overrides import workload_overrides  # noqa: PLC0415
    from smolcluster.launch.saved import train_or_go_on  # noqa: PLC0415 - see above

    return train_or_go_on(
        config,
        [*stated_keys(override, num_steps), *workload_overrides(workload)],
        default=training_source(None, default=default_config, workload=workload),
        run_id=run_id,
        resume=resume,
    )


@app.command("checkpoints", epilog=below("smolcluster checkpoints"))
def _checkpoints(
    run: Run = "latest",
    *,
    as_json: Json = False,
) -> int:
    """List a run's checkpoints: step, losses, size, good or damaged. Exits with 1 if one is damaged."""
    from smolcluster.commands.checkpoints import show_checkpoints  # noqa: PLC0415 - see above

    return show_checkpoints(run, as_json=as_json)


@app.command(
    "export",
    epilog=below(
        "smolcluster export --to model", "smolcluster export latest --best --transformers --to gpt2"
    ),
)
def _export(
    run: Run = "latest",
    *,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to write into.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of the lowest validation loss, not the newest.")
    ] = False,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="As transformers reads it: a GPT, or a model of a folder; adapters as peft does.",
        ),
    ] = False,
    workload: TrustedWorkload = None,
) -> int:
    """Write a run's model as a plain model.safetensors."""
    from smolcluster.commands.checkpoints import export_model  # noqa: PLC0415 - see above

    return export_model(run, to, best=best, transformers=transformers, workload=workload)


@app.command("merge", epilog=below("smolcluster merge latest --into llama-tuned"))
def _merge(
    run: Run = "latest",
    *,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder to write into.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of the lowest validation loss, not the newest.")
    ] = False,
    workload: TrustedWorkload = None,
) -> int:
    """Write a fine-tuned Hugging Face model: base and LoRA adapters as one, for from_pretrained."""
    from smolcluster.commands.checkpoints import merge_model  # noqa: PLC0415 - see above

    return merge_model(run, into, best=best, workload=workload)


@app.command(
    "generate",
    epilog=below("smolcluster generate latest --prompt 'def ' --max-tokens 100 --seed 1"),
)
def _generate(
    run: Run = "latest",
    *,
    prompt: Annotated[
        str, typer.Option("--prompt", help="Text to go on from.  [default: a new document]")
    ] = "",
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    seed: Seed = 0,
) -> int:
    """Let a language model write, from the best checkpoint of its run."""
    from smolcluster.commands.generate import generate  # noqa: PLC0415 - see above
    from smolcluster.launch.language_model import GenerateOptions  # noqa: PLC0415

    return generate(run, prompt, GenerateOptions(max_tokens, temperature, top_k, seed))


@app.command("chat", epilog=below("smolcluster chat", "smolcluster chat latest --temperature 0.5"))
def _chat(
    run: Run = "latest",
    *,
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    seed: Seed = 0,
) -> int:
    """Type lines, from which a run's language model goes on, token by token."""
    from smolcluster.commands.generate import chat  # noqa: PLC0415 - see above
    from smolcluster.launch.language_model import GenerateOptions  # noqa: PLC0415

    return chat(run, GenerateOptions(max_tokens, temperature, top_k, seed))
