from smolcluster.utils.seed import derive_seed


def test_derived_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert derive_seed(42, "permutation", 3) == 1231084163272518082
    assert derive_seed(0) == 7520536977032167579


def test_each_use_has_a_seed_of_its_own() -> None:
    uses: list[tuple[int | str, ...]] = [("a",), ("b",), ("a", 0), ("a", 1), ("a", "1"), ("a,1",)]
    seeds = {derive_seed(seed, *use) for seed in range(3) for use in uses}
    assert len(seeds) == 3 * len(uses)
    assert all(0 <= seed < 2**63 for seed in seeds)
