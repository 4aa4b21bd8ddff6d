"""
H. Delays and prefetch: init mode x offload x sharding degree x prefetch x delay, at parity bit for bit.

On an accelerator, simulated or real, there are 282 combinations. COVERED has 42 of them, in which every compatible pair
of values occurs; so it does in the 19 without features that not every engine offers (backward prefetch by policy, no
sharding). Init mode and offload cannot be exercised on a CPU, so there all 47 remaining combinations run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.streams import every_race
from fsdp_conformance.faults.delay import CollectiveDelay, FreeDelay, PointDelay, ReductionDelay
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.collective import Op
from fsdp_conformance.plan import BackwardPrefetch, InitMode, Offload, Sharding

#: init mode, offload, degree, prefetch, delay.
COVERED = frozenset(
    tuple(row.split())
    for row in """
    before      off         full        pre         reduction
    before      off         full        pre         after-loss
    before      off         full        post        before-step
    before      off         full        forward     none
    before      off         no-shard    default     none
    before      cpu         full        pre         none
    before      cpu         full        post        before-free
    before      cpu         grad-optim  default     all-gather
    before      cpu         grad-optim  default     after-loss
    before      cpu         no-shard    default     before-step
    before      cpu_pinned  full        default     reduction
    before      cpu_pinned  full        default     before-free
    before      cpu_pinned  full        none        all-gather
    before      cpu_pinned  full        none        reduction
    before      cpu_pinned  full        pre         before-step
    before      cpu_pinned  full        post        all-gather
    before      cpu_pinned  grad-optim  default     before-step
    before      cpu_pinned  no-shard    default     before-free
    after       off         full        default     after-loss
    after       off         full        default     before-free
    after       off         full        none        after-loss
    after       off         full        pre         before-free
    after       off         full        post        reduction
    after       off         full        forward     before-step
    after       off         grad-optim  default     none
    after       off         grad-optim  forward     all-gather
    after       off         grad-optim  forward     reduction
    after       off         no-shard    default     reduction
    never       cpu         full        default     reduction
    never       cpu         full        default     before-step
    never       cpu         full        none        none
    never       cpu         full        none        before-free
    never       cpu         full        pre         all-gather
    never       cpu         full        post        none
    never       cpu         full        post        after-loss
    never       cpu         grad-optim  default     none
    never       cpu         grad-optim  forward     before-free
    never       cpu_pinned  full        default     all-gather
    never       cpu_pinned  full        none        before-step
    never       cpu_pinned  full        forward     none
    never       cpu_pinned  full        forward     after-loss
    never       cpu_pinned  no-shard    default     after-loss
    """.strip().splitlines()
)

#: Long compared with a collective of a probe (well below a millisecond), short compared with a case.
_DELAY_MS = 15.0

_DELAYS = ("none", "all-gather", "reduction", "after-loss", "before-step", "before-free")
_PREFETCH = ("default", "none", "pre", "post", "forward")
_DEGREES = {"full": Sharding.FULL, "grad-optim": Sharding.GRAD_OPTIM, "no-shard": Sharding.NONE}
_DEGREE_FLAG = {"full": "zero3", "grad-optim": "zero2", "no-shard": "no_shard"}


def stands_together(values: dict[str, Any]) -> bool:
    """
    True if values are compatible.

    Without gathers there is nothing to prefetch and none to delay; gradient sharding gathers in forward only. Offloaded
    parameters must not be moved to the device after wrapping (R015).
    """
    if values["init"] == "after" and values["offload"] != "off":
        return False
    if values["degree"] == "full":
        return True
    prefetches = ("default", "forward") if values["degree"] == "grad-optim" else ("default",)
    return values["prefetch"] in prefetches and not (values["degree"] == "no-shard" and values["delay"] == "all-gather")


def _applies(values: dict[str, Any]) -> bool:
    if values["init"] == "never" and values["offload"] == "off":
        return stands_together(values)
    row = tuple(str(values[name]) for name in ("init", "offload", "degree", "prefetch", "delay"))
    return row in COVERED and stands_together(values)


def _needs(values: dict[str, Any]) -> list[str]:
    needs = [_DEGREE_FLAG[values["degree"]]]
    if values["init"] != "never":
        needs.append(f"init_{values['init']}")
    if values["offload"] != "off":
        needs.append("cpu_offload_params")
    if values["prefetch"] != "default":
        needs.append("prefetch_forward" if values["prefetch"] == "forward" else "prefetch_backward")
    return needs


def _environment(values: dict[str, Any]) -> list[str]:
    needs = []
    if values["init"] != "never" or values["offload"] != "off":
        needs.append("accelerator")
    if values["offload"] == "cpu_pinned":
        needs.append("pinned_memory")
    return needs


def _kills(values: dict[str, Any]) -> list[str]:
    # The races of an engine must not depend on the delay: the checker sees them in every case.
    races = ["scales-without-waiting"] if "accelerator" in _environment(values) and values["offload"] == "off" else []
    if "prefetch_backward" in _needs(values):
        races = ["reference-forgets-the-gather"] if "accelerator" in _environment(values) else []
        return ["reference-sums-gradients", *races]
    return ["no-reduction", "reads-before-wait", *races]


def _fault(delay: str) -> Fault | None:
    """The delay of that name, on rank 1."""
    faults = {
        "all-gather": CollectiveDelay(op=Op.ALL_GATHER, ranks=(1,), milliseconds=_DELAY_MS),
        "reduction": ReductionDelay(ranks=(1,), milliseconds=_DELAY_MS),
        "after-loss": PointDelay(point="after_loss", ranks=(1,), milliseconds=_DELAY_MS),
        "before-free": FreeDelay("stages.1.linear", ranks=(1,), milliseconds=_DELAY_MS),
        "before-step": PointDelay(point="before_step", ranks=(1,), milliseconds=_DELAY_MS),
    }
    return faults.get(delay)


def _every_fault(degree: str) -> list[Fault]:
    """A delay at every point of the step, each on another rank; without sharding there is no all-gather to delay."""
    faults: list[Fault] = [
        CollectiveDelay(op=Op.ALL_GATHER, ranks=(0,), milliseconds=_DELAY_MS),
        ReductionDelay(ranks=(1,), milliseconds=_DELAY_MS),
        PointDelay(point="after_loss", ranks=(2,), milliseconds=_DELAY_MS),
        PointDelay(point="before_step", ranks=(3,), milliseconds=_DELAY_MS),
    ]
    return faults[1:] if degree == "no-shard" else faults


def _may_not_apply(faults: Sequence[Fault | None]) -> list[str]:
    """The descriptions of those that strike collectives, which an engine may not issue."""
    return [fault.describe() for fault in faults if isinstance(fault, CollectiveDelay)]


class Delays(ConformanceTestCase):
    """One rank is late at one point of the step; no rank's numbers change, and no rank reads too early."""

    # On hardware, a delay reveals a race only by luck.
    hazard_requirements = every_race("R073", parameters="R074")

    @conformance_case(
        "R073",
        "R074",
        "R002",
        "R003",
        chapter="H",
        world_size=2,
        axes={
            "init": tuple(InitMode),
            "offload": tuple(Offload),
            "degree": tuple(_DEGREES),
            "prefetch": _PREFETCH,
            "delay": _DELAYS,
        },
        only=_applies,
        needs=_needs,
        environment=_environment,
        kills=_kills,
        faults=lambda values: _may_not_apply([_fault(values["delay"])]),
    )
    def test_matrix(self, init: str, offload: str, degree: str, prefetch: str, delay: str) -> None:
        """A late rank does not change losses, gradients or parameters, in any mode."""
        workload = probes.exact_nested()
        fault = _fault(delay)
        plan = self.plan(
            workload,
            init_mode=InitMode(init),
            offload=Offload(offload),
            sharding=_DEGREES[degree],
            backward_prefetch=BackwardPrefetch.DEFAULT if prefetch == "forward" else BackwardPrefetch(prefetch),
            forward_prefetch=prefetch == "forward",
        )
        run = self.check_stream_safety(workload, plan, faults=[fault] if fault else [])
        self.check_parity(run, workload, requirement="R073")

    @conformance_case(
        "R073",
        "R074",
        "R002",
        "R003",
        chapter="H",
        world_size=4,
        axes={"degree": ("default", *_DEGREES)},
        needs=lambda values: [] if values["degree"] == "default" else [_DEGREE_FLAG[values["degree"]]],
        kills=("no-reduction",),
        faults=lambda values: _may_not_apply(_every_fault(values["degree"])),
    )
    def test_everything_late(self, degree: str) -> None:
        """Simultaneous delays at every point of the step, each on a different rank, change nothing."""
        workload = probes.exact_nested()
        faults = _every_fault(degree)
        plan = self.plan(workload, sharding=_DEGREES.get(degree, Sharding.DEFAULT))
        run = self.train(workload, plan, faults=faults)
        self.check_undisturbed(run, workload, plan, faults=faults)
        self.check_parity(run, workload, requirement="R073")
