"""How fast text becomes tokens, and what the cache of tokens saves a second start.

MB/s are those of one core, with GPT-2's tokenizer: the whole text at once through the library's own call,
and in pieces as smolcluster does it. A start is a process of its own that loads the dataset `text` into a
fresh cache, then another one that finds it there; of its seconds, those after the imports are shown apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import report
from smolcluster.data.tokenizer import cut, load_tokenizer

TARGETS = {"mb_per_s": 1.0, "second_start_s": 1.0}
START = """
import json, sys, time
from pathlib import Path
from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.corpus import load_corpus
text, tokenizer, cache = sys.argv[1:]
begin = time.perf_counter()
config = DatasetConfig(
    name="text", root=Path(text), tokenizer=tokenizer, cache=Path(cache), download=False
)
data = load_corpus(config, 128)
print(json.dumps([time.perf_counter() - begin, data.fingerprint]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of tokenizing, and of a second start.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder with gpt2-tokenizer and tinyshakespeare.txt",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of tokenizing")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "1"
    text, tokenizer = arguments.data / "tinyshakespeare.txt", arguments.data / "gpt2-tokenizer"
    num_mb = text.stat().st_size / 1e6
    pieces_s, library_s = measure_speed(text, tokenizer, arguments.rounds)
    (first_s, first_load_s), (second_s, second_load_s) = measure_starts(text, tokenizer)
    results = {
        "text_mb": round(num_mb, 3),
        "mb_per_s": round(num_mb / pieces_s, 2),
        "whole_text_mb_per_s": round(num_mb / library_s, 2),
        "first_start_s": round(first_load_s, 2),
        "second_start_s": round(second_load_s, 3),
        "first_process_s": round(first_s, 2),
        "second_process_s": round(second_s, 2),
    }
    report(f"tokenizing {text.name}, one core", table(results), results, as_json=arguments.json)


def measure_speed(text: Path, tokenizer: Path, rounds: int) -> tuple[float, float]:
    """Seconds of a core for the text in pieces, and for the library's own call on the whole of it."""
    whole = text.read_text(encoding="utf-8")
    ours = load_tokenizer(str(tokenizer))

    import transformers  # noqa: PLC0415 - after the number of threads is set

    theirs = transformers.GPT2Tokenizer(
        vocab=str(tokenizer / "vocab.json"), merges=str(tokenizer / "merges.txt")
    )
    calls: tuple[Callable[[], object], ...] = (
        lambda: ours.encode_batch(list(cut([whole]))),
        lambda: theirs(whole, verbose=False)["input_ids"],
    )
    measured = [[core_seconds(call) for call in calls] for _ in range(rounds)]
    pieces, library = (statistics.median(column) for column in zip(*measured, strict=True))
    return pieces, library


def core_seconds(call: Callable[[], object]) -> float:
    """Seconds that one call takes of a core, whatever else the machine does."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure_starts(text: Path, tokenizer: Path) -> list[tuple[float, float]]:
    """Seconds of the whole process, and of loading the data in it, for a first and a second start."""
    starts, fingerprints = [], set()
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", START, str(text), str(tokenizer), cache]
        for _ in range(2):
            start = time.perf_counter()
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            process_s = time.perf_counter() - start
            load_s, fingerprint = json.loads(run.stdout)
            starts.append((process_s, load_s))
            fingerprints.add(fingerprint)
    if len(fingerprints) != 1:
        raise SystemExit("the second start found other tokens than the first one made")
    return starts


def table(results: dict[str, float]) -> list[tuple[str, ...]]:
    return [
        ("", "measured", "target"),
        ("in pieces", f"{results['mb_per_s']:.2f} MB/s", f">= {TARGETS['mb_per_s']:g}"),
        ("the library, whole text", f"{results['whole_text_mb_per_s']:.2f} MB/s", ""),
        ("first start: loading the data", f"{results['first_start_s']:.2f} s", ""),
        (
            "second start: loading the data",
            f"{results['second_start_s']:.3f} s",
            f"<= {TARGETS['second_start_s']:g}",
        ),
        ("first start: the process", f"{results['first_process_s']:.2f} s", ""),
        ("second start: the process", f"{results['second_process_s']:.2f} s", ""),
    ]


if __name__ == "__main__":
    main()
