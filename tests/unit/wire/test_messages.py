import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connection_pairs import LEASE, one_of_each, push, tensor
from smolcluster.algorithms.Mesh import store
from smolcluster.errors import ProtocolError
from smolcluster.server import offering
from smolcluster.wire.frames import MAX_HEADER_NBYTES
from smolcluster.wire.messages import (
    FROM_SERVER,
    FROM_WORKER,
    MAX_SENTENCE_CHARS,
    MAX_WANTED,
    MESSAGES,
    PS,
    SESSION,
    Ack,
    Commit,
    Heartbeat,
    Kinds,
    LeaseKey,
    Message,
    Pull,
    Push,
    Ready,
    Reject,
    ServedData,
    WantState,
    check_kind,
    decode,
    encode,
    frame_of,
    numbered,
    payload_nbytes,
)

counts = st.integers(0, 2**53)
leases = st.builds(
    LeaseKey,
    incarnation=st.just("ab12"),
    epoch=counts,
    start=counts,
    stop=st.integers(1, 2**53),
    grant=counts,
)
pushes = st.builds(
    Push,
    lease=leases,
    base_version=counts,
    bucket=counts,
    num_buckets=st.integers(1, 2**53),
    num_samples=st.integers(1, 2**53),
    num_terms=counts,
    loss=st.floats(-1e30, 1e30),
    compute_s=st.floats(0, 1e9),
    tensor=st.integers(0, 2**40).map(tensor),
)
commits = st.builds(
    Commit,
    version=counts,
    num_samples=st.integers(1, 2**53),
    clip=st.floats(0, allow_infinity=False),
    learning_rate=st.floats(0, allow_infinity=False),
    tensor=st.none() | st.integers(0, 2**40).map(tensor),
)
pulls = st.builds(Pull, buckets=st.none() | st.lists(counts, min_size=1).map(tuple))
rejects = st.builds(
    Reject,
    code=st.just("busy"),
    sentence=st.text(),
    retry_after_s=st.none() | st.floats(0, allow_infinity=False),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def fields(message: Any) -> dict[str, Any]:
    return json.loads(encode(message))  # type: ignore[no-any-return]


def as_header(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("message", one_of_each(), ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert decode(message.KIND, encode(message)) == message


@given(pushes | commits | pulls | rejects)
def test_any_values_survive_the_wire(message: Message) -> None:
    assert decode(message.KIND, encode(message)) == message


def test_the_numbers_of_the_kinds_are_fixed() -> None:
    names = {number: model.__name__ for number, model in MESSAGES.items()}
    numbers = [number for number in range(1, 65) if number not in (14, 26, 27, 49, 50, 51)]
    assert names == dict(zip(numbers, (type(each).__name__ for each in one_of_each()), strict=True))


def test_a_number_has_one_meaning() -> None:
    of_others = offering.OFFER.kinds | {store.Ask, store.Answer}
    numbered(frozenset(MESSAGES.values()) | of_others)
    assert len(of_others) == 5


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=100))
def test_random_headers_are_refused(kind: int, header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(kind, b"\x00" + header)


@given(st.sampled_from(sorted(MESSAGES)), json_values)
def test_other_json_is_refused(kind: int, value: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(kind, as_header({"nonsense": value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", one_of_each(), ids=lambda message: type(message).__name__)
def test_unknown_missing_and_repeated_fields_are_refused(message: Any) -> None:
    good = fields(message)
    with pytest.raises(ProtocolError, match="field 'extra'"):
        decode(message.KIND, as_header({**good, "extra": 1}))
    for name in good:
        if type(message).model_fields[name].is_required():
            with pytest.raises(ProtocolError, match=f"field '{name}'"):
                decode(message.KIND, as_header({k: v for k, v in good.items() if k != name}))
    if good:
        twice = encode(message)[:-1] + b"," + as_header(good)[1:]
        with pytest.raises(ProtocolError, match="given twice"):
            decode(message.KIND, twice)


def one(name: str) -> Message:
    """The sample of a message."""
    return next(each for each in one_of_each() if type(each).__name__ == name)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("Assignment", "version", -1),
        ("Assignment", "first_bucket", -1),
        ("Assignment", "backup", 1),
        ("Push", "compute_s", -0.5),
        ("Push", "base_version", "3"),
        ("Push", "base_version", True),
        ("Push", "base_version", 3.0),
        ("Push", "base_version", -1),
        ("Push", "base_version", 2**53 + 1),
        ("Push", "num_samples", 0),
        ("Push", "loss", "0.5"),
        ("Push", "lease", [0, 1]),
        ("Push", "lease", {**LEASE.model_dump(), "stop": 0}),
        ("Push", "lease", {**LEASE.model_dump(), "incarnation": "two words"}),
        ("Push", "tensor", {**tensor(16).model_dump(), "nbytes": -1}),
        ("Push", "tensor", {**tensor(16).model_dump(), "shape": ["4"]}),
        ("Push", "tensor", {**tensor(16).model_dump(), "shape": [1] * 9}),
        ("Push", "tensor", {**tensor(16).model_dump(), "shape": 4}),
        ("Hello", "node", "a\nb"),
        ("Pull", "buckets", []),
        ("Pull", "buckets", [0, -1]),
        ("Pull", "buckets", ["0"]),
        ("Pull", "buckets", [0] * 8193),
        ("State", "content", ""),
        ("State", "content", "two words"),
        ("Reduced", "num_buckets", 0),
        ("Reduced", "tensor", None),
        ("Commit", "num_samples", 0),
        ("Commit", "clip", -0.5),
        ("Commit", "learning_rate", -1.0),
        ("Cancel", "num_buckets", -1),
        ("Skip", "compute_s", -0.5),
        ("Skip", "lease", None),
    ],
)
def test_wrong_types_and_bounds_are_refused(kind: str, name: str, value: object) -> None:
    good = one(kind)
    with pytest.raises(ProtocolError, match=f"{kind}: field '{name}"):
        decode(good.KIND, as_header({**fields(good), name: value}))


@pytest.mark.parametrize(
    ("kind", "sayers", "others"),
    [(Commit.KIND, FROM_SERVER, FROM_WORKER), (Push.KIND, FROM_WORKER, FROM_SERVER)],
)
def test_a_step_is_said_by_the_server_and_answered_by_workers(
    kind: int, sayers: Kinds, others: Kinds
) -> None:
    check_kind(kind, sayers)
    with pytest.raises(ProtocolError, match="unexpected"):
        check_kind(kind, others)


def test_the_longest_pull_fits_in_a_header() -> None:
    assert len(encode(Pull(buckets=tuple(range(10_000, 14_096))))) <= MAX_HEADER_NBYTES


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    header = encode(push()).replace(b'"loss":0.5', b'"loss":' + number.encode())
    with pytest.raises(ProtocolError):
        decode(Push.KIND, header)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{} {}",
        b"\xff\xfe{}",
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"a\\ud800":1}',
    ],
    ids=[
        "empty",
        "list",
        "null",
        "two",
        "latin",
        "utf-16",
        "bom",
        "deep-list",
        "deep-dict",
        "half",
    ],
)
def test_headers_that_are_no_object_are_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Heartbeat.KIND, header)
    assert len(str(caught.value)) < 400


def test_a_set_s_digest_tells_what_its_messages_may_hold() -> None:
    class Other(Ack):
        more: int

    changed = replace(PS, from_listener=PS.from_listener - {Ack} | {Other})
    assert changed.digest != PS.digest == replace(PS).digest
    assert PS.digest != SESSION.digest


def test_messages_of_two_sets_with_one_number_are_refused() -> None:
    class Twin(Message, kind=Ack.KIND):
        """Another message of that number."""

    with pytest.raises(ValueError, match="same number"):
        check_kind(Ack.KIND, PS.kinds | {Twin})


def test_complaints_do_not_repeat_what_a_stranger_wrote() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Heartbeat.KIND, as_header({"evil\n\x1b[31m" + "x" * 10_000: 1}))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_sentence_is_one_printable_line() -> None:
    long = Reject(code="busy", sentence="first\nsecond\x1b[0m " + "x" * 5000)
    assert long.sentence.startswith("first second [0m x")
    assert len(long.sentence) == MAX_SENTENCE_CHARS


def test_a_user_may_give_data_any_name_and_a_driver_its_device() -> None:
    named = [ServedData(name=each, fingerprint="a", num_samples=1).name for each in NAMES]
    ready = {"dataset_fingerprint": "d", "model_fingerprint": "m", "samples_per_s": 0.0}
    devices = [Ready.model_validate({**ready, "device": each}).device for each in NAMES]
    assert named == devices == ["größe 2", 64 * "x", "?"]


NAMES = ("größe\n2", 100 * "x", "\0")


def test_the_longest_names_of_tensors_fit_in_a_header() -> None:
    names = MAX_WANTED * (512 * "\x01",)
    assert len(encode(WantState(attempt=1, content="weights", names=names))) <= MAX_HEADER_NBYTES


def test_a_message_without_tensor_has_no_payload() -> None:
    assert payload_nbytes(Ack(lease=LEASE, outcome="late", version=1)) == 0
    assert payload_nbytes(push(16)) == 16
    commit = one("Commit")
    assert payload_nbytes(commit) == 32
    assert payload_nbytes(commit.model_copy(update={"tensor": None})) == 0
    with pytest.raises(ValueError, match="Push announces 16 bytes of payload, got 15"):
        frame_of(push(16), bytes(15))
    with pytest.raises(ValueError, match="Heartbeat announces 0 bytes"):
        frame_of(Heartbeat(sent_at=1.0), b"x")
