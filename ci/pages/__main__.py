"""
`ci/docs`: check the pages, or bring generated parts and quoted output up to date.

Quoted output is only rewritten if its words have changed; new numbers alone change no page. Between
`...` lines the beginning and the end of a quotation are written; what is in the middle is reported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from pages.blocks import ROOT, blocks_of, pages, text_of
from pages.generated import GENERATED, with_tables
from pages.transcript import Ran, is_run, run_page, settled


def main(arguments: list[str]) -> int:
    """Returns 0 if the pages are true (now), else 1."""
    parser = argparse.ArgumentParser(prog="ci/docs", description="Check the pages, or bring them up to date.")
    parser.add_argument("--write", action="store_true", help="write generated pages and quoted output anew")
    parser.add_argument("--no-run", action="store_true", help="the generated pages alone; run no command")
    parser.add_argument("page", nargs="*", help="paths of pages (default: all)")
    parsed = parser.parse_args(arguments)
    wanted = parsed.page or sorted({*pages(), *GENERATED})
    problems = [problem for page in wanted if (problem := _generated(page, write=parsed.write))]
    if not parsed.no_run:
        problems += [problem for page in wanted for problem in _run(page, write=parsed.write)]
    for problem in problems:
        print(problem, end="\n\n")
    print(f"docs: {len(wanted)} pages, {len(problems)} problems")
    return 1 if problems else 0


def _generated(page: str, *, write: bool) -> str:
    text = GENERATED[page]() if page in GENERATED else with_tables(text_of(page))
    path = ROOT / page
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return ""
    if not write:
        return f"{page} is out of date: run ci/docs --write"
    path.write_text(text, encoding="utf-8")
    return ""


def _run(page: str, *, write: bool) -> list[str]:
    if not any(is_run(block) or block.word == "script" for block in blocks_of(page)):
        return []
    problems = []
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-docs-") as directory:
        for ran in run_page(page, Path(directory)):
            problem = ran.problem()
            if problem and not (write and ran.status == ran.expected_status and _rewrite(page, ran)):
                problems.append(problem)
    return problems


def _rewrite(page: str, ran: Ran) -> bool:
    """Put what was printed in the place of the quotation. False if that cannot be done by itself."""
    new = _shortened(ran.quoted, settled(ran.output))
    text = text_of(page)
    if new is None or text.count(ran.quoted) != 1:
        return False
    (ROOT / page).write_text(text.replace(ran.quoted, new), encoding="utf-8")
    return True


def _shortened(quoted: str, output: str) -> str | None:
    """The output with as many lines before and after `...` as the quotation has; None if it has several."""
    before, after = quoted.splitlines(), output.splitlines()
    cuts = [number for number, line in enumerate(before) if line.strip() == "..."]
    if len(cuts) > 1:
        return None
    if cuts:
        tail = len(before) - cuts[0] - 1
        after = [*after[: cuts[0]], before[cuts[0]], *(after[-tail:] if tail else [])]
    return "".join(f"{line.rstrip()}\n" for line in after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
