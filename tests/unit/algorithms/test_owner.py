"""What a process that owns a run decides before it builds what is trained."""

from smolcluster.algorithms.owner import LOCAL_BUCKET_BYTES, bucket_bytes_for
from smolcluster.configs.resolve import load_settings
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES


def test_buckets_are_large_where_all_processes_are_on_one_machine() -> None:
    local = load_settings("syncps", "digits", None, [], {}, local=True, local_workers=2)
    assert bucket_bytes_for(local.cluster) == LOCAL_BUCKET_BYTES
    shared = load_settings("syncps", "digits", None, [], {})
    assert bucket_bytes_for(shared.cluster) == DEFAULT_BUCKET_BYTES
    named = load_settings("syncps", "digits", None, ["bind=[mini1.local]"], {})
    assert bucket_bytes_for(named.cluster) == DEFAULT_BUCKET_BYTES
