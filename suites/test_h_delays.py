"""H. Delays and prefetch: init mode x offload x delay x sharding degree x prefetch, at parity bit for bit."""

from __future__ import annotations

from typing import Any

from fsdp_conformance.case import conformance_case
from fsdp_conformance.config import BackwardPrefetch, InitMode, Offload, Sharding
from fsdp_conformance.faults.delay import CollectiveDelay, FreeDelay, PointDelay, ReductionDelay
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.collective import Op
from fsdp_conformance.testing import ConformanceTestCase

#: Long against a collective of a probe (well below a millisecond), short against a case.
_DELAY_MS = 15.0

_DELAYS = ("none", "all-gather", "reduction", "after-loss", "before-step", "before-free")
_PREFETCH = ("default", "none", "pre", "post", "forward")
_DEGREES = {"full": Sharding.FULL, "grad-optim": Sharding.GRAD_OPTIM, "no-shard": Sharding.NONE}
_DEGREE_FLAG = {"full": "zero3", "grad-optim": "zero2", "no-shard": "no_shard"}


def _applies(values: dict[str, Any]) -> bool:
    """Without a gather there is nothing to prefetch and none to delay; gradient sharding gathers in forward only."""
    if values["degree"] == "full":
        return True
    prefetches = ("default", "forward") if values["degree"] == "grad-optim" else ("default",)
    return values["prefetch"] in prefetches and not (values["degree"] == "no-shard" and values["delay"] == "all-gather")


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
    wanted = []
    if values["init"] != "never" or values["offload"] != "off":
        wanted.append("accelerator")
    if values["offload"] == "cpu_pinned":
        wanted.append("pinned_memory")
    return wanted


class Delays(ConformanceTestCase):
    """One rank is late at one place of the step; nobody's numbers change."""

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
        kills=("no-reduction", "reads-before-wait"),
    )
    def test_matrix(self, init: str, offload: str, degree: str, prefetch: str, delay: str) -> None:
        """A rank that is late leaves losses, gradients and parameters as they were, in every mode."""
        workload = probes.exact_nested()
        fault = self._fault(delay)
        plan = self.plan(
            workload,
            init_mode=InitMode(init),
            offload=Offload(offload),
            sharding=_DEGREES[degree],
            backward_prefetch=BackwardPrefetch.DEFAULT if prefetch == "forward" else BackwardPrefetch(prefetch),
            forward_prefetch=prefetch == "forward",
        )
        run = self.train(workload, plan, faults=[fault] if fault else [])
        self.check_parity(run, workload, requirements=dict.fromkeys(("loss", "gradient", "parameter"), "R073"))

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
    )
    def test_everything_late(self, degree: str) -> None:
        """Delays at every place of the step at once, each on another rank, change nothing."""
        workload = probes.exact_nested()
        faults: list[Fault] = [
            CollectiveDelay(op=Op.ALL_GATHER, ranks=(0,), milliseconds=_DELAY_MS),
            ReductionDelay(ranks=(1,), milliseconds=_DELAY_MS),
            PointDelay(point="after_loss", ranks=(2,), milliseconds=_DELAY_MS),
            PointDelay(point="before_step", ranks=(3,), milliseconds=_DELAY_MS),
        ]
        if degree == "no-shard":
            del faults[0]
        run = self.train(workload, self.plan(workload, sharding=_DEGREES.get(degree, Sharding.DEFAULT)), faults=faults)
        self.check_parity(run, workload, requirements=dict.fromkeys(("loss", "gradient", "parameter"), "R073"))

    def _fault(self, delay: str) -> Fault | None:
        """The delay by its name, on rank 1."""
        faults = {
            "all-gather": CollectiveDelay(op=Op.ALL_GATHER, ranks=(1,), milliseconds=_DELAY_MS),
            "reduction": ReductionDelay(ranks=(1,), milliseconds=_DELAY_MS),
            "after-loss": PointDelay(point="after_loss", ranks=(1,), milliseconds=_DELAY_MS),
            "before-free": FreeDelay("stages.1.linear", ranks=(1,), milliseconds=_DELAY_MS),
            "before-step": PointDelay(point="before_step", ranks=(1,), milliseconds=_DELAY_MS),
        }
        return faults.get(delay)
