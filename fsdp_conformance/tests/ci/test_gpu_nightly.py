"""The nightly run on GPUs: too few GPUs for some cases is not a failure, but running nothing is."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required

ENGINES = ("reference", "torch-fsdp2", "torch-fsdp1", "torch-fsdp1-shard-grad-op", "torch-fsdp1-hybrid-shard")
COMPONENTS = ("reference-components", "torch-dtensor", "torch-ddp")
JUDGED = (*ENGINES, *COMPONENTS)

#: Judges no engine: each that is named in JUDGED leaves a run file.
CERTIFY = """\
#!/bin/sh
while [ $# -gt 0 ]; do if [ "$1" = --report ]; then report=$2; fi; shift; done
for engine in $JUDGED; do mkdir -p "$report/$engine"; echo >"$report/$engine/run.jsonl"; done
exit "$CERTIFY_STATUS"
"""

#: The environment's Python, which runs ci/nightly, ci/summary.py and ci/known_findings.py.
PYTHON = f"""\
#!/bin/sh
case $1 in
    *known_findings.py) exit "$KNOWN_STATUS" ;;
    */ci/nightly) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("judged", "certified", "known", "status"),
    [
        (JUDGED, 3, 0, 0),
        (JUDGED, 3, 1, 1),
        (JUDGED[1:], 3, 0, 3),
        (JUDGED[:-1], 3, 0, 3),
        ((), 3, 0, 3),
        (JUDGED, 1, 0, 0),
        (JUDGED, 4, 0, 4),
    ],
    ids=[
        "too few GPUs",
        "and a new finding",
        "an engine did not run",
        "a component did not run",
        "none did",
        "known findings",
        "suite failed",
    ],
)
def test_status(tmp_path: Path, judged: tuple[str, ...], certified: int, known: int, status: int) -> None:
    """Cases that need more GPUs than there are do not count, as long as every engine was judged."""
    (tmp_path / "ci").mkdir()
    for name in ("nightly", "driver.py", "components.py"):
        shutil.copy(ROOT / "ci" / name, tmp_path / "ci")
    scripts = {"ci/certify": CERTIFY, "ci/setup": f"#!/bin/sh\necho {tmp_path}/env\n", "env/bin/python": PYTHON}
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    words = [f"--output={tmp_path}/results", "--without=deepspeed", "--without=tests", "--without=studies"]
    variables = {"JUDGED": " ".join(judged), "CERTIFY_STATUS": str(certified), "KNOWN_STATUS": str(known)}
    done = subprocess.run(
        [tmp_path / "ci/nightly", *words, "--device", "cuda"],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == status, done.stderr


def test_the_job_runs_the_whole_profile_with_torch_for_gpus() -> None:
    """A world size leaves cases out, and the index of builds for the CPU has no CUDA."""
    workflow = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    before, job = re.split(r"^  gpu:$", workflow, flags=re.MULTILINE)

    assert "--device cuda" in job
    assert "--world-size" not in job
    assert "vars.PIP_EXTRA_INDEX_URL" not in job + before.partition("jobs:")[0]


def test_a_device_without_known_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run there is told how to begin its list, instead of being compared with another device's."""
    main = runpy.run_path(str(ROOT / "ci/known_findings.py"))["main"]
    run = RunFile(path="run.jsonl", header={"settings": {"implementation": "reference", "device": "cuda"}}, footer={})
    monkeypatch.setattr(main.__globals__["runfile"], "read", lambda path: run)
    for name, value in {"known_cases": lambda profile: (), "profile_of": lambda run: None}.items():
        monkeypatch.setitem(main.__globals__, name, value)

    assert main(["run.jsonl"]) == 1
    output = capsys.readouterr().out
    assert "known-findings.toml has no entry for device 'cuda'" in output
    assert "update-expectations run.jsonl --file ci/known-findings.toml" in output
    run.header["settings"]["device"] = "cpu"
    main(["run.jsonl"])
    assert "no entry for device" not in capsys.readouterr().out
