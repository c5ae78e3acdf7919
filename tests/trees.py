"""The syntax of the project's files, of which several tests look at all."""

import ast
import functools
import gc
from collections.abc import Sequence
from pathlib import Path


@functools.cache
def nodes_of(path: Path) -> Sequence[ast.AST]:
    """All nodes of a file, read once. They are many, and collecting garbage among them would take as long."""
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_bytes(), str(path))))
    finally:
        gc.enable()
