from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.observability.report.settings import Setting, changed_settings, differing


def settings(*overrides: str, train: str = "digits") -> Settings:
    return load_settings("edp", train, None, overrides, environ={}, local=True)


def changed(*overrides: str, train: str = "digits") -> dict[str, Setting]:
    return {each.key: each for each in changed_settings(settings(*overrides, train=train))}


def test_only_what_is_not_its_default_is_named() -> None:
    found = changed("learning_rate=0.5", "staleness.bound=4", "threads=2")
    assert found["learning_rate"] == Setting("learning_rate", "0.5", "0.001")
    assert found["staleness.bound"] == Setting("staleness.bound", "4", "null")
    assert found["threads"].value == "2"
    assert changed("runs_dir=/tmp/runs")["runs_dir"].value == "/tmp/runs"  # noqa: S108
    assert not {"staleness.exponent", "weight_decay", "optimizer", "seed"} & found.keys()


def test_another_kind_of_model_is_compared_with_its_own_defaults() -> None:
    found = changed("model.num_layers=3", train="stdlib")
    assert found["model.type"] == Setting("model.type", "GPT", "SimpleNN")
    assert found["model.num_layers"] == Setting("model.num_layers", "3", "6")
    assert "model.max_seq_len" not in changed("model.max_seq_len=128", train="stdlib")


def test_what_must_be_said_has_no_default() -> None:
    assert changed()["dataset.name"] == Setting("dataset.name", "digits", "")


def test_runs_are_compared_setting_by_setting() -> None:
    runs = [settings("num_epochs=3"), settings("num_epochs=4"), None]
    assert differing(runs) == {"num_epochs": ["3", "4", ""]}
    assert differing(runs[:1]) == {}


def test_a_setting_that_only_one_run_has_differs() -> None:
    rows = differing([settings(), settings(train="stdlib")])
    assert rows["model.hidden"][1] == ""
    assert rows["model.type"] == ["SimpleNN", "GPT"]
