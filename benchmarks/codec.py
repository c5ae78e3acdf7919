"""The int8 codec against a plain copy of the same float32 tensor: one thread, preallocated buffers.

The tensor is worked on bucket by bucket, as in a push. A ratio is the time of `copy_` over the time
of the operation: 1 is as fast as copying, and higher is better. GB/s count the float32 bytes, once.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common import Paired, paired_ratios, report
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.int8 import Int8BlockCodec

BUCKET = 262_144
NUM_SAMPLES = 32
TARGETS = {"encode_ratio": 0.35, "encode_feedback_ratio": 0.2, "decode_ratio": 0.75}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the int8 codec against copy_.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--numel", type=int, default=17_500_000, help="values in the tensor")
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds an operation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    codec = Int8BlockCodec()
    measured = measure(codec, arguments.numel, arguments.rounds)
    float_bytes = 4 * arguments.numel
    encoded_bytes = sum(codec.encoded_nbytes(b.stop - b.start) for b in buckets(arguments.numel))
    results = {name: round(paired.ratio, 3) for name, paired in measured.items()} | {
        "payload_ratio": round(float_bytes / encoded_bytes, 3),
        "scratch_bytes": scratch_nbytes(codec),
        "copy_gb_per_s": round(float_bytes / measured["encode_ratio"].reference_s / 1e9, 2),
    }
    report(
        "int8 codec, one thread",
        table(measured, results, float_bytes),
        results,
        as_json=arguments.json,
    )


def measure(codec: Int8BlockCodec, numel: int, rounds: int) -> dict[str, Paired]:
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
            feedback.encode(bucket, values, NUM_SAMPLES, payload)
        feedback.commit()

    def decode() -> None:
        for _, _, target, payload in views:
            codec.decode(payload, target)

    operations: dict[str, Callable[[], None]] = dict(
        zip(TARGETS, (encode, encode_feedback, decode), strict=True)
    )
    copy = partial(copied.copy_, gradient)
    return {name: paired_ratios(copy, call, rounds) for name, call in operations.items()}


def buckets(numel: int) -> list[slice]:
    """Cut `numel` values into buckets of 1 MiB; the last one is what is left."""
    return [slice(start, min(start + BUCKET, numel)) for start in range(0, numel, BUCKET)]


def scratch_nbytes(codec: Int8BlockCodec) -> int:
    """Bytes of the buffers that the codec keeps; error feedback takes none beyond its residuals."""
    return sum(value.nbytes for value in vars(codec).values() if isinstance(value, Tensor))


def table(
    measured: dict[str, Paired], results: dict[str, float], float_bytes: int
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "ms", "GB/s", "ratio to copy_", "target")]
    copy_s = measured["encode_ratio"].reference_s
    rows.append(("copy_", f"{copy_s * 1e3:.2f}", f"{float_bytes / copy_s / 1e9:.1f}", "1", ""))
    for name, paired in measured.items():
        speed = float_bytes / paired.candidate_s / 1e9
        label = name.removesuffix("_ratio").replace("_", " with ")
        rows.append(
            (
                label,
                f"{paired.candidate_s * 1e3:.2f}",
                f"{speed:.1f}",
                f"{paired.ratio:.3f}",
                f">= {TARGETS[name]}",
            )
        )
    rows.append(("float32 / int8 payload", "", "", f"{results['payload_ratio']:.3f}", ">= 3.9"))
    rows.append(("scratch", "", "", f"{results['scratch_bytes'] / 1e6:.2f} MB", "<= 2 MB"))
    return rows


if __name__ == "__main__":
    main()
