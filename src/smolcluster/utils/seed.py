"""Seeds: one number in the configuration, an independent one for every use."""

import hashlib
import json
from collections.abc import Mapping

HASH_SEED = "PYTHONHASHSEED"
"""A variable of Python: the order of a set of texts depends on it, and is another one in each process."""


def with_hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment with the `PYTHONHASHSEED` of all processes of a launch.

    It is what the user has set to a number, else 0. A vocabulary made of a set is then numbered alike by all
    of them, also when the run is resumed.
    """
    stated = environ.get(HASH_SEED, "")
    return {**environ, HASH_SEED: stated if stated.isdigit() else "0"}


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2^63) for the use that `parts` names, such as `("permutation", epoch)`.

    The same on every platform; different parts give unrelated seeds, and 1 is not "1".
    """
    text = json.dumps([seed, *parts], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
