"""The quantizing codecs against a plain copy of the same float32 tensor: one thread, preallocated buffers.

The tensor is worked on bucket by bucket, as in a push. A ratio is the time of `copy_` over the time
of the operation: 1 is as fast as copying, and higher is better. GB/s count the float32 bytes, once.
`topk` is measured in GB/s, as what it does is a search and not a pass over memory.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common import Paired, paired_ratios, report
from smolcluster.codec.base import Codec
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec

BUCKET = 262_144
OPERATIONS = ("encode", "encode_feedback", "decode")


@dataclass(frozen=True)
class Aims:
    """What a codec should reach: of each operation the ratio to `copy_`, or GB/s; and a payload's size."""

    speeds: tuple[float, float, float]
    smaller: float
    unit: str = "ratio"


AIMS: Mapping[str, Aims] = {
    "int8": Aims((0.35, 0.2, 0.75), smaller=3.9),
    "int4": Aims((0.2, 0.15, 0.4), smaller=7.5),
    "topk": Aims((0.1, 0.1, 0.1), smaller=100, unit="gb_per_s"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the codecs against copy_.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--codec", nargs="+", choices=AIMS, default=list(AIMS))
    parser.add_argument("--numel", type=int, default=17_500_000, help="values in the tensor")
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds an operation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[tuple[str, ...]] = [("", "ms", "GB/s", "ratio to copy_", "aim")]
    results: dict[str, object] = {}
    for name in arguments.codec:
        codec = get_codec(name)
        measured = measure(codec, arguments.numel, arguments.rounds)
        found = results_of(codec, arguments.numel, measured)
        results |= {f"{name}.{key}": value for key, value in found.items()}
        rows += table(name, found, measured)
    title = f"codecs, one thread, {arguments.numel:,} values, {arguments.rounds} rounds"
    report(title, rows, results, as_json=arguments.json)


def measure(codec: Codec, numel: int, rounds: int) -> dict[str, Paired]:
    """Time each operation on a tensor of `numel` values, paired with a copy of it."""
    gradient = torch.randn(numel).mul_(1e-3)
    copied = torch.empty(numel)
    feedback = ErrorFeedback(codec, numel)
    payloads = [
        torch.zeros(codec.encoded_nbytes(b.stop - b.start), dtype=torch.uint8)
        for b in buckets(numel)
    ]
    views = [(b, gradient[b], copied[b], p) for b, p in zip(buckets(numel), payloads, strict=True)]

    def encode() -> None:
        for _, values, _, payload in views:
            codec.encode(values, payload)

    def encode_feedback() -> None:
        for bucket, values, _, payload in views:
            feedback.encode(bucket, values, payload)
        feedback.commit()

    def decode() -> None:
        for _, _, target, payload in views:
            codec.decode(payload, target)

    operations: dict[str, Callable[[], None]] = dict(
        zip(OPERATIONS, (encode, encode_feedback, decode), strict=True)
    )
    copy = partial(copied.copy_, gradient)
    return {name: paired_ratios(copy, call, rounds) for name, call in operations.items()}


def buckets(numel: int) -> list[slice]:
    """Cut `numel` values into buckets of 1 MiB; the last one is what is left."""
    return [slice(start, min(start + BUCKET, numel)) for start in range(0, numel, BUCKET)]


def results_of(codec: Codec, numel: int, measured: Mapping[str, Paired]) -> dict[str, float]:
    float_bytes = 4 * numel
    encoded_bytes = sum(codec.encoded_nbytes(b.stop - b.start) for b in buckets(numel))
    found = {f"{name}_ratio": round(paired.ratio, 3) for name, paired in measured.items()}
    speeds = {
        f"{name}_gb_per_s": round(float_bytes / paired.candidate_s / 1e9, 3)
        for name, paired in measured.items()
    }
    return {
        **found,
        **speeds,
        "payload_ratio": round(float_bytes / encoded_bytes, 3),
        "scratch_bytes": scratch_nbytes(codec),
        "copy_gb_per_s": round(float_bytes / measured["encode"].reference_s / 1e9, 2),
    }


def scratch_nbytes(owner: object) -> int:
    """Bytes of the buffers that a codec keeps; error feedback takes none beyond its residuals."""
    values = list(vars(owner).values())
    own = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return own + sum(scratch_nbytes(value) for value in values if isinstance(value, Codec))


def table(
    name: str, found: Mapping[str, float], measured: Mapping[str, Paired]
) -> list[tuple[str, ...]]:
    aims = AIMS[name]
    copy_s = measured["encode"].reference_s
    rows: list[tuple[str, ...]] = [
        ("copy_ beside " + name, f"{copy_s * 1e3:.2f}", f"{found['copy_gb_per_s']:.1f}", "1", "")
    ]
    for operation, aim in zip(OPERATIONS, aims.speeds, strict=True):
        paired = measured[operation]
        speed, ratio = found[f"{operation}_gb_per_s"], found[f"{operation}_ratio"]
        label = f"{name} {operation.replace('_', ' with ')}"
        unit = " GB/s" if aims.unit == "gb_per_s" else ""
        ms = f"{paired.candidate_s * 1e3:.2f}"
        rows.append((label, ms, f"{speed:.2f}", f"{ratio:.3f}", f">= {aim}{unit}"))
    payload = f"{found['payload_ratio']:.2f}"
    rows.append((f"float32 / {name} payload", "", "", payload, f">= {aims.smaller}"))
    scratch = f"{found['scratch_bytes'] / 1e6:.2f} MB"
    rows.append(("scratch", "", "", scratch, "<= 2.2 MB"))
    return rows


if __name__ == "__main__":
    main()
