"""The page of torch's names under CUDA's names, from the table that the simulator installs refusals from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from fsdp_conformance.simulator.as_cuda import surface
from fsdp_conformance.simulator.as_cuda.surface import Entry, Status

_PAGE = """\
<!-- Written by `ci/docs --write`; edit fsdp_conformance/simulator/as_cuda/surface.toml instead. -->

# Names of torch under simulated CUDA

Look here to see whether a function that your code calls works without a GPU. This table has every public name of
`torch.cuda` and its modules, of `torch.distributed` and its modules, and the tensor methods for CUDA: {number} names.
With [simulated GPUs](simulated-cuda.md) or under [`sanitize --as-cuda`](sanitize.md),

- {own} are *reimplemented* on the simulated device;
- {torch} are *torch's*: its code runs unchanged, on top of other names and of the device's kernels, or they are data;
- {refused} are *refused*: using one raises `NotSimulated`, with the reason;
- {listed} are *listed*: they mean nothing here.

A test compares the table with the installed torch. It fails if the table lacks one of torch's names, if a name is not
what the table says, if a refused name does not raise its reason, or if a function of `torch.cuda` that needs no
argument cannot be called.

| module | own | torch's | refused | listed |
|---|--:|--:|--:|--:|
{modules}

## Own behaviour

| module | names |
|---|---|
{owned}

## Refused

| names | why |
|---|---|
{refusals}

## Listed

| names | why |
|---|---|
{listing}

## Not in the table

| modules | why |
|---|---|
{left_out}
"""


def page() -> str:
    """The text of docs/simulated-cuda-names.md."""
    table = surface.table()
    counts = Counter(status for entry in table.values() for status in entry.statuses.values())
    left_out: dict[str, list[str]] = {}
    for module, why in surface.left_out().items():
        left_out.setdefault(why, []).append(module)
    return _PAGE.format(
        number=sum(counts.values()),
        **{status.value: counts[status] for status in Status},
        modules="\n".join(_row(module, entry) for module, entry in table.items()),
        owned="\n".join(f"| `{module}` | {_code(names)} |" for module, names in _with_status(table, Status.OWN)),
        refusals="\n".join(_by_reason(table, Status.REFUSED)),
        listing="\n".join(_by_reason(table, Status.LISTED)),
        left_out="\n".join(f"| {_code(modules)} | {why} |" for why, modules in left_out.items()),
    )


def _row(module: str, entry: Entry) -> str:
    counts = Counter(entry.statuses.values())
    return f"| `{module}` | {' | '.join(str(counts[status] or '') for status in Status)} |"


def _with_status(table: Mapping[str, Entry], status: Status) -> Iterator[tuple[str, list[str]]]:
    for module, entry in table.items():
        names = [name for name, one in entry.statuses.items() if one is status]
        if names:
            yield module, names


def _by_reason(table: Mapping[str, Entry], status: Status) -> Iterator[str]:
    for module, names in _with_status(table, status):
        reasons = table[module].reasons
        for why in dict.fromkeys(reasons[name] for name in names):
            yield f"| {_code(f'{module}.{name}' for name in names if reasons[name] == why)} | {why} |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
