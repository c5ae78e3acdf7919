import pytest

from smolcluster.utils.seed import HASH_SEED, derive_seed, with_hash_seed


def test_derived_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert derive_seed(42, "permutation", 3) == 1231084163272518082
    assert derive_seed(0) == 7520536977032167579


def test_each_use_has_a_seed_of_its_own() -> None:
    uses: list[tuple[int | str, ...]] = [("a",), ("b",), ("a", 0), ("a", 1), ("a", "1"), ("a,1",)]
    seeds = {derive_seed(seed, *use) for seed in range(3) for use in uses}
    assert len(seeds) == 3 * len(uses)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("stated", "seed"), [({}, "0"), ({HASH_SEED: "7"}, "7"), ({HASH_SEED: "random"}, "0")]
)
def test_one_hash_seed_for_all_that_is_launched(stated: dict[str, str], seed: str) -> None:
    assert with_hash_seed(stated) == stated | {HASH_SEED: seed}
