"""Build the site, check it, and list it among the versions that lie next to it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

import fsdp_conformance
from pages.blocks import ROOT
from pages.site import built, stage

#: Where the generator is installed, next to the environment and not in it: nothing else needs it.
TOOL = ROOT / ".venvs/site-generator"
CONSTRAINTS = (ROOT / "ci/constraints.txt", ROOT / "ci/constraints-site.txt")
VERSIONS = "versions.json"

_START = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>fsdp-conformance</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">fsdp-conformance {version}</a>
</html>
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 for problems of the pages, 3 if the generator cannot be installed."""
    parser = argparse.ArgumentParser(prog="ci/site", description="Build the documentation as a static site.")
    parser.add_argument("--output", type=Path, default=ROOT / "site", metavar="DIR", help="default: site")
    output = parser.parse_args(arguments).output.absolute()
    began = time.monotonic()
    if not install():
        return 3
    version = fsdp_conformance.__version__
    target = output / version
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-site-") as folder:
        count = stage.write(Path(folder))
        status = generate(Path(folder), target)
    if status:
        return 1
    problems = built.problems(target)
    print(*problems, sep="\n", end="\n" if problems else "")
    list_version(output, version)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    seconds = time.monotonic() - began
    print(f"{target}: {count} pages, {size / 1e6:.1f} MB, {seconds:.0f} s, {len(problems)} problems")
    return 1 if problems else 0


def install() -> bool:
    """Install the extra `site` into its own folder if that has not been done; False if pip fails."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = repr(extras["site"]) + "".join(path.read_text(encoding="utf-8") for path in CONSTRAINTS)
    digest = hashlib.sha256(f"{sys.version}{wanted}".encode()).hexdigest()
    stamp = TOOL / "digest"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return True
    shutil.rmtree(TOOL, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TOOL)]
    command += [word for path in CONSTRAINTS for word in ("--constraint", str(path))]
    if subprocess.run([*command, *extras["site"]], check=False).returncode:
        print("site: pip cannot install the extra `site` of pyproject.toml; its output says why", file=sys.stderr)
        return False
    stamp.write_text(digest, encoding="utf-8")
    return True


def generate(folder: Path, target: Path) -> int:
    """Run the generator, for which warnings are errors, and put its result in place. Returns its exit status."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    variables = {**os.environ, "PYTHONPATH": str(TOOL)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return done.returncode
    # Servers take the page for unknown addresses from their own root, and this one lies below it.
    (folder / "site/404.html").unlink(missing_ok=True)
    # A page that is read without a server takes the index from here, and see assets/worker.js. The generator's own
    # plugin for that would load a script from the network.
    index = (folder / "site/search.json").read_text(encoding="utf-8")
    (folder / "site/search.js").write_text(f"var __index = {index}", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(folder / "site", target)
    return 0


def list_version(output: Path, version: str) -> None:
    """Add the version to the list that the selector on each page reads, newest first, and lead to the newest."""
    versions = sorted({version, *(path.parent.name for path in output.glob("*/index.html"))}, key=Version, reverse=True)
    listed = [{"version": each, "title": each, "aliases": ["latest"] * (each == versions[0])} for each in versions]
    (output / VERSIONS).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (output / "index.html").write_text(_START.format(version=versions[0]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
