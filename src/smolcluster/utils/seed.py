"""Seeds: one number in the configuration, an independent one for every use."""

import hashlib
import json


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2^63) for the use that `parts` names, such as `("permutation", epoch)`.

    The same on every platform; different parts give unrelated seeds, and 1 is not "1".
    """
    text = json.dumps([seed, *parts], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
