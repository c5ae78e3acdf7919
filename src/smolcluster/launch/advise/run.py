"""The command `advise`, and `launch --auto`, which does what it says."""

import sys
from dataclasses import replace
from functools import partial

from smolcluster.configs.resolve import check_algorithm
from smolcluster.launch.advise.command import Found, find_advice
from smolcluster.launch.advise.show import advice_line, as_json, show
from smolcluster.launch.advise.stores import with_stores_chosen
from smolcluster.launch.local import launch
from smolcluster.launch.plan import Request
from smolcluster.launch.remote import LaunchOptions
from smolcluster.launch.requests import check_model, settings_of, training_line
from smolcluster.observability.terminal import SteadyConsole, print_line

DO_NOT_DISTRIBUTE = 4
"""Exit code: one machine alone is about as fast, or faster."""


def advise_command(
    request: Request, *, local: bool, sync: bool, overwrite: bool, in_json: bool
) -> int:
    """Measure, and print what to do; returns the exit code.

    Raises:
        SmolclusterError: nothing can be said.
    """
    say = partial(print_line, SteadyConsole(stderr=True))
    found = find_advice(request, say, local=local, sync=sync, overwrite=overwrite)
    if in_json:
        sys.stdout.write(f"{as_json(found)}\n")
    else:
        show(found, SteadyConsole())
    return _code(found)


def launch_as_stated(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch what the files say; with `stores: auto` where the links say; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    say = partial(print_line, SteadyConsole())
    settings = settings_of(request, local)
    check_algorithm(settings, request.algorithm.name)
    check_model(request, settings)
    if how.on == "ssh" or not how.dry_run:  # a file for a scheduler says it itself
        say(training_line(request, settings))
    return launch(with_stores_chosen(request, say, local=local), how, local=local)


def launch_advised(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Measure, say in one line what is done, and do it; returns the exit code.

    Nothing is launched where one machine alone is about as fast.

    Raises:
        SmolclusterError: nothing can be said, or the launch is prevented.
    """
    console = SteadyConsole()
    say = partial(print_line, console)
    say(training_line(request, settings_of(request, local)))
    found = find_advice(request, say, local=local, sync=how.sync, overwrite=how.overwrite)
    say(advice_line(found))
    if found.request is None:
        return _code(found)
    return launch(found.request, replace(how, prediction=found.prediction), local=local)


def _code(found: Found) -> int:
    return DO_NOT_DISTRIBUTE if found.advice.chosen is None else 0
