"""Each option of the table reaches the settings, whether it is typed after `fsdp-conformance run` or after `pytest`."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fsdp_conformance import run_settings
from fsdp_conformance.cli import arguments
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.pytest_plugin import options
from fsdp_conformance.run_settings import DEFAULTS, OPTIONS, Option, RunSettings

#: Words that some option takes; each option is tried with the first that it takes and that is not its default.
_WORDS = ("2", "R001", "nccl")


def word_for(option: Option) -> str:
    """A word that changes the settings."""
    for word in (*option.choices, *_WORDS):
        try:
            if option.read([word] if option.is_list else word) != getattr(DEFAULTS, option.target):
                return word
        except ConfigError:
            continue
    raise AssertionError(f"no word for {option.flag}: add one to _WORDS")


@pytest.fixture(autouse=True)
def _each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option may need another one, which is tested elsewhere, and no last run exists."""

    def with_last_failed(settings: RunSettings) -> RunSettings:
        return replace(settings, last_failed=("R001/failed-ws2",))

    monkeypatch.setattr(run_settings, "_RULES", ())
    monkeypatch.setattr(arguments, "with_last_failed", with_last_failed)
    monkeypatch.setattr("fsdp_conformance.report.last_run.with_last_failed", with_last_failed)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_an_option_reaches_the_settings(
    option: Option, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways in make the same settings, which differ from the defaults in the option's field alone."""
    words = [word_for(option)] if option.metavar else []
    by_command = arguments.settings_of(arguments.parse(["run", option.flag, *words]))
    namespace = pytestconfig._parser.parse_known_args([option.pytest_flag, *words])
    monkeypatch.setattr(pytestconfig, "option", namespace)
    # A worker of pytest-xdist takes the order of its controller instead of the options.
    monkeypatch.setattr(pytestconfig, "workerinput", {}, raising=False)
    # Each new run draws its own seed.
    by_pytest = replace(options._make_order(pytestconfig).settings, drawn_seed=DEFAULTS.drawn_seed)
    changed = [field.name for field in fields(RunSettings)
               if getattr(by_command, field.name) != getattr(DEFAULTS, field.name)]  # fmt: skip

    # The cases on the user's own model have a profile of their own.
    assert changed == [*["profile"] * (option.name == "workload"), option.target]
    assert by_pytest == by_command
    assert run_settings.order_from_json(run_settings.RunOrder(settings=by_command).to_json()).settings == by_command


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_settings_name_the_options_that_make_them(option: Option) -> None:
    """The words for the settings make the same settings; the ids of the last failures are looked up."""
    words = [word_for(option)] if option.metavar else []
    settings = arguments.settings_of(arguments.parse(["run", option.flag, *words]))

    assert arguments.settings_of(arguments.parse(["run", *option.words(settings)])) == settings
    assert option.words(DEFAULTS) == []
