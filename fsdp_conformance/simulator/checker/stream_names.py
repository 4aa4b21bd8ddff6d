"""
The variable that a stream was assigned to, read from the source of the line that made it.

Standard library only, as the hazards that carry it.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fsdp_conformance.simulator.frames import Frame, Owner, owner

#: What a call that makes a stream is named, as in `torch.cuda.Stream()` or `handle.Stream(priority=-1)`.
_MAKERS = ("Stream", "ExternalStream")

_Assigned = tuple[ast.expr, ast.expr]


def assigned_to(stack: Sequence[Frame]) -> str:
    """
    The target that the line which made a stream assigns it to: "side", "self.copy_stream", "streams['copy']".

    `stack` is that of the call, innermost first. "" if the stream is not assigned, if the line makes several, or if its
    source is not at hand.
    """
    frame = next((frame for frame in stack if owner(frame.file) in (Owner.USER, Owner.TORCH)), None)
    return _names_by_line(frame.file).get(frame.line, "") if frame is not None else ""


@lru_cache(maxsize=256)
def _names_by_line(file: str) -> dict[int, str]:
    """The variable of each line of a file that makes one stream and assigns it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    names: dict[int, str] = {}
    makers: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _makes_a_stream(node):
            makers[node.lineno] = makers.get(node.lineno, 0) + 1
        for target, value in _assigned(node):
            for call in _values(value):
                if _makes_a_stream(call):
                    names[call.lineno] = ast.unparse(target)
    return {line: name for line, name in names.items() if makers[line] == 1}


def _assigned(node: ast.AST) -> Iterator[_Assigned]:
    """Each target with the expression that it gets."""
    match node:
        case ast.Assign(targets=[target, *_], value=value):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                yield from zip(target.elts, value.elts, strict=True)
            else:
                yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value


def _values(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose value this one may have: itself, or its alternatives."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield from _values(body)
            yield from _values(orelse)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _values(value)
        case _:
            yield node


def _makes_a_stream(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _MAKERS
    return False
