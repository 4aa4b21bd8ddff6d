"""The scope of a case: base, advice, an extension or a combination."""

from __future__ import annotations

import pytest

from fsdp_conformance import contract
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract import scopes
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.contract.scopes import ADVICE, BASE, extension_of, scope_of, title


@pytest.mark.parametrize(
    ("requirement", "needs", "scope"),
    [
        ("R001", (), BASE),
        ("R001", ("zero3",), ("zero-3",)),
        ("R070", (), ADVICE),
        ("R070", ("zero3", "coll_counts"), ADVICE),
        # R063 binds who declares zero2 and coll_counts, R072 who declares coll_counts alone.
        ("R063", (), ("zero-2",)),
        ("R072", (), ("traffic",)),
        ("R093", ("no_sync",), ("accumulation",)),
        # Two extensions together are a combination.
        ("R084", ("hsdp", "mixed_precision"), ("hybrid", "mixed-precision")),
        ("R073", ("zero3", "init_before", "cpu_offload_params"), ("init-modes", "offload", "zero-3")),
        # Flags of one extension are one extension.
        ("R083", ("mixed_precision", "mp_reduce"), ("mixed-precision",)),
        # What only makes sense within another extension is not combined with it.
        ("R077", ("prefetch_explicit", "zero3"), ("explicit-prefetch",)),
        ("R097", ("hsdp", "hsdp_defer_allreduce", "coll_counts"), ("hsdp-defer-allreduce",)),
        # A view counts only where nothing else is tested.
        ("R151", ("hsdp", "coll_counts"), ("hybrid",)),
        ("R034", ("zero3", "reshard_after_forward", "sharded_state"), ("resharding",)),
        ("R035", ("sharded_state",), ("sharded-state",)),
        ("R062", ("zero3", "coll_counts"), ("traffic",)),
    ],
)
def test_the_scope_follows_from_the_requirement_and_the_needs(
    requirement: str, needs: tuple[str, ...], scope: tuple[str, ...]
) -> None:
    """Each rule, with a case it is for."""
    assert scope_of(contract.load()[requirement], needs) == scope


def test_every_capability_has_one_extension() -> None:
    """A flag that is in no group is an extension by itself, and each group names existing flags, each once."""
    grouped = [flag for flags in scopes.GROUPS.values() for flag in flags]

    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= CAPABILITIES.keys()
    assert (extension_of("no_sync"), extension_of("shard_dim")) == ("accumulation", "shard-dim")
    # An extension never has the name of a flag that is in another one.
    alone = {extension_of(flag) for flag in CAPABILITIES.keys() - set(grouped)}
    assert alone & scopes.GROUPS.keys() == set()


def test_names_that_rules_mention_exist() -> None:
    """A misspelt name would silently make a rule void."""
    extensions = {extension_of(flag) for flag in CAPABILITIES}
    mentioned = {*scopes.WITHIN, *(name for names in scopes.WITHIN.values() for name in names), *scopes.VIEWS}

    assert mentioned <= extensions


def test_titles() -> None:
    """Scopes are listed as in the headline of a certificate."""
    assert (title(BASE), title(("hybrid", "offload"))) == ("base", "hybrid + offload")


@pytest.mark.parametrize("name", ["core-2026.11", "components-2026.11", "sample"])
def test_shipped_profiles_have_the_scopes_of_their_cases(name: str) -> None:
    """The stored scopes are still right."""
    requirements = contract.load()

    assert [
        entry.id
        for entry in load_profile(name).entries
        if entry.scope != scope_of(requirements[entry.primary], entry.needs)
    ] == []
