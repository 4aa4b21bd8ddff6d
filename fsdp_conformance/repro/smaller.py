"""
Definitions made smaller for one script: arguments that always have one value, branches that are never taken, functions
that are called once.

What the code computes stays the same, bit for bit. The rules are applied to the syntax tree until none changes it.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

from fsdp_conformance.repro.sources import names_of

#: The longest line that a rule may make.
_COLUMNS = 118

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other,
    ast.Mult: lambda one, other: one * other,
    ast.Eq: lambda one, other: one == other,
    ast.NotEq: lambda one, other: one != other,
    ast.Is: lambda one, other: one is other,
    ast.IsNot: lambda one, other: one is not other,
}


def smaller(definitions: Sequence[str], roots: Sequence[str], evaluated: Mapping[str, Callable[..., Any]]) -> list[str]:
    """
    The definitions that the `roots` need, and the roots, which are the last ones.

    Calls of functions that are `evaluated` become their result if their arguments are literals.
    """
    kept = {name for root in roots for node in ast.parse(root).body for name in names_of(node)}
    tree, before = ast.parse("\n".join([*definitions, *roots])), ""
    while (text := ast.unparse(tree)) != before:
        before = text
        tree = _arguments(tree, left=evaluated)
        for rule in _RULES:
            tree = ast.parse(ast.unparse(rule(tree)))
        tree = _Folded(evaluated).visit(tree)
        tree.body = _used(tree.body, kept)
    # Without the blank lines that separate methods.
    return [re.sub(r"\n\n+", "\n", ast.unparse(node)) for node in tree.body]


def applied(call: str, definitions: Iterable[str]) -> str:
    """The expression that the called function returns, or the call if there is no such expression."""
    called = cast("ast.Call", cast("ast.Expr", ast.parse(call).body[0]).value)
    functions = [node for each in definitions for node in ast.parse(each).body if isinstance(node, ast.FunctionDef)]
    function = next(each for each in functions if each.name == ast.unparse(called.func))
    value = function.body[0].value if isinstance(function.body[0], ast.Return) else None
    into = None if value is None else _applied(called, function, value)
    return call if into is None else ast.unparse(into)


class _Folded(ast.NodeTransformer):
    """Computes what is known: operations on literals, branches, calls of partial functions and of evaluated ones."""

    def __init__(self, evaluated: Mapping[str, Callable[..., Any]]) -> None:
        self._evaluated = evaluated

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None and type(node.op) in _OPERATORS:
            return _literal(_OPERATORS[type(node.op)](left, right))
        if isinstance(node.op, ast.Mult) and right == 1.0 and _is_floating(node.left):
            return node.left
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if isinstance(node.left, ast.Tuple) and ast.unparse(sides[-1]) == "None":
            return _literal(isinstance(node.ops[0], ast.IsNot | ast.NotEq))
        if (
            len(sides) == 2
            and type(node.ops[0]) in _OPERATORS
            and all(isinstance(each, ast.Constant) for each in sides)
        ):
            return _literal(_OPERATORS[type(node.ops[0])](*(cast("ast.Constant", each).value for each in sides)))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        first = node.values[0]
        if not isinstance(first, ast.Constant):
            return node
        rest = node.values[1:]
        if bool(first.value) == decides:
            return first
        return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return _literal(not node.operand.value)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        last = next((number for number, each in enumerate(node.body) if isinstance(each, ast.Return)), None)
        node.body = node.body if last is None else node.body[: last + 1]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """A field of a tuple that is made here: `BatchKey(step=step, ...).step`."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "BatchKey":
            return next((each.value for each in node.value.keywords if each.arg == node.attr), node)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        self.generic_visit(node)
        node.elts = _spread(node.elts)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.args = _spread(node.args)
        called = node.func
        if isinstance(called, ast.Call) and ast.unparse(called.func) == "partial":
            return ast.Call(called.args[0], [*called.args[1:], *node.args], [*called.keywords, *node.keywords])
        if not isinstance(called, ast.Name):
            return node
        if called.id == "partial" and len(node.args) == 1 and not node.keywords:
            return node.args[0]
        if called.id == "tuple" and len(node.args) == 1 and isinstance(node.args[0], ast.Tuple):
            return node.args[0]
        if called.id == "getattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return self.visit_Attribute(ast.Attribute(node.args[0], str(node.args[1].value), ast.Load()))
        values = [*node.args, *(each.value for each in node.keywords)]
        if called.id in self._evaluated and all(isinstance(each, ast.Constant) for each in values):
            return _literal(
                self._evaluated[called.id](
                    *(cast("ast.Constant", each).value for each in node.args),
                    **{str(each.arg): cast("ast.Constant", each.value).value for each in node.keywords},
                )
            )
        return node


class _Replaced(ast.NodeTransformer):
    """Expressions in the place of names that are read."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load) and node.id in self._values
        return copy.deepcopy(self._values[node.id]) if is_read else node


def _constants(tree: ast.Module) -> ast.Module:
    """Numbers in the place of the constants that name them."""
    numbers = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _number(node.value) is not None
    }
    tree.body = [node for node in tree.body if not numbers.keys() & set(names_of(node))]
    return cast("ast.Module", _Replaced(numbers).visit(tree))


def _seeds(tree: ast.Module) -> ast.Module:
    """A seed at the beginning in the place of `pure_build` and `seeded_init`: a script restores no random state."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        if [ast.unparse(each) for each in node.decorator_list] == ["pure_build"]:
            node.decorator_list = []
            node.body.insert(0, _seed([ast.Constant(node.name)]))
        first = node.body[0]
        inside = first.items[0].context_expr if isinstance(first, ast.With) else None
        if isinstance(first, ast.With) and isinstance(inside, ast.Call) and ast.unparse(inside.func) == "seeded_init":
            node.body = [_seed(inside.args), *first.body]
    return tree


def _seed(key: Iterable[ast.expr]) -> ast.stmt:
    seed = ast.Call(ast.Name("seed_of"), [ast.Constant("init"), *key], [])
    return ast.Expr(ast.Call(ast.Attribute(ast.Name("torch"), "manual_seed"), [seed], []))


def _arguments(tree: ast.Module, left: Container[str]) -> ast.Module:
    """Literals in the place of parameters that have the same in all calls, except of functions that are `left`."""
    for node in tree.body:
        function = _initializer(node) if isinstance(node, ast.ClassDef) else node
        if not isinstance(function, ast.FunctionDef) or function.name in left:
            continue
        calls = _calls(tree, cast("ast.FunctionDef | ast.ClassDef", node).name)
        if not calls:
            continue
        bound = [_bound(each, function, skipped=isinstance(node, ast.ClassDef)) for each in calls]
        if None in bound:
            continue
        rest = function.args.vararg.arg if function.args.vararg else ""
        for name in bound[0].keys() - {rest}:  # type: ignore[union-attr]
            values = [cast("dict[str, ast.expr | None]", each)[name] for each in bound]
            texts = {ast.unparse(value) if value is not None else "" for value in values}
            value = values[0]
            if len(texts) == 1 and value is not None and _is_plain(value) and not _stores(function, name):
                _without_parameter(function, name, calls, skipped=isinstance(node, ast.ClassDef))
                function.body = [_Replaced({name: value}).visit(each) for each in function.body]
                return tree
    return tree


def _initializer(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)


def _calls(tree: ast.Module, name: str) -> list[ast.Call]:
    """The calls of a function or of a class's initializer; none if it is used in another way."""
    heirs = {name}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in heirs for base in node.bases):
            heirs.add(node.name)
    own = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in heirs - {name}]
    direct = heirs - {each.name for each in own if _initializer(each)}
    calls: list[ast.Call] = []
    uses = 0
    for node in tree.body:
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        uses -= sum(ast.unparse(base) in direct for base in bases)
        inherits = isinstance(node, ast.ClassDef) and any(ast.unparse(base) in direct for base in bases)
        for each in ast.walk(node):
            uses += isinstance(each, ast.Name) and each.id in direct
            if isinstance(each, ast.Call):
                called = ast.unparse(each.func)
                first = ast.unparse(each.args[0]) if called == "partial" and each.args else ""
                if called in direct or first in direct:
                    calls.append(each)
                elif inherits and called == "super().__init__":
                    calls.append(each)
                    uses += 1
    return calls if uses == len(calls) else []


def _bound(call: ast.Call, function: ast.FunctionDef, *, skipped: bool) -> dict[str, ast.expr | None] | None:
    """The value of each parameter, None where it is unknown; None for a call that unpacks."""
    rest, given = function.args.vararg, call.args[: len(function.args.args) - skipped if function.args.vararg else None]
    if any(isinstance(each, ast.Starred) for each in given) or any(each.arg is None for each in call.keywords):
        return None
    if function.args.kwarg is not None:
        return None
    is_partial = ast.unparse(call.func) == "partial"
    by_place = function.args.args[skipped:]
    values: dict[str, ast.expr | None] = {each.arg: None for each in (*by_place, *function.args.kwonlyargs)}
    if not is_partial:
        defaults = zip(function.args.args[::-1], function.args.defaults[::-1], strict=False)
        values |= {parameter.arg: default for parameter, default in defaults}
        keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        values |= {parameter.arg: default for parameter, default in keywords}
    values |= {parameter.arg: value for parameter, value in zip(by_place, call.args[is_partial:], strict=False)}
    if rest is not None:
        values[rest.arg] = None if is_partial else ast.Tuple(call.args[len(by_place) :], ast.Load())
    return values | {str(each.arg): each.value for each in call.keywords}


def _without_parameter(function: ast.FunctionDef, name: str, calls: Iterable[ast.Call], *, skipped: bool) -> None:
    given = function.args
    places = [each.arg for each in given.args]
    if name in places:
        place = places.index(name)
        for call in calls:
            inside = place - skipped + (ast.unparse(call.func) == "partial")
            del call.args[inside : inside + 1]
        from_end = place - len(given.args)
        if -from_end <= len(given.defaults):
            del given.defaults[from_end]
        del given.args[place]
    else:
        place = [each.arg for each in given.kwonlyargs].index(name)
        del given.kwonlyargs[place], given.kw_defaults[place]
    for call in calls:
        call.keywords = [each for each in call.keywords if each.arg != name]


def _attributes(tree: ast.Module) -> ast.Module:
    """Literals in the place of attributes that only initializers set, each time to the same."""
    own = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    for name in dict.fromkeys(each.attr for each in own):
        stores = [
            assigned
            for node in tree.body
            if isinstance(node, ast.ClassDef) and (initializer := _initializer(node))
            for assigned in initializer.body
            if isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) == f"self.{name}"
        ]
        uses = [each for each in own if each.attr == name]
        if not stores or any(ast.unparse(each.value) != "self" for each in uses):
            continue
        value, reads = stores[0].value, [each for each in uses if isinstance(each.ctx, ast.Load)]
        is_same = len({ast.unparse(each.value) for each in stores}) == 1 and len(uses) == len(stores) + len(reads)
        if is_same and _is_plain(value) and (not isinstance(value, ast.Tuple) or len(reads) < 2):
            return cast("ast.Module", _WithoutAttribute(name, value).visit(tree))
    return tree


class _WithoutAttribute(ast.NodeTransformer):
    """A literal in the place of an attribute."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        if isinstance(node.targets[0], ast.Attribute) and node.targets[0].attr == self._name:
            return None
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return copy.deepcopy(self._value) if node.attr == self._name else node


def _returned(tree: ast.Module) -> ast.Module:
    """A variable that is read once, by the next statement, is its value there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for number, (first, second) in enumerate(zip(node.body, node.body[1:], strict=False)):
            name = first.targets[0] if isinstance(first, ast.Assign) and len(first.targets) == 1 else None
            if (
                not isinstance(name, ast.Name)
                or not isinstance(second, ast.Return | ast.Assign)
                or second.value is None
            ):
                continue
            value = cast("ast.Assign", first).value
            is_whole = isinstance(second.value, ast.Name) and isinstance(second, ast.Return)
            is_path = all(
                isinstance(each, ast.Name | ast.Attribute | ast.Subscript | ast.Tuple | ast.expr_context)
                for each in ast.walk(value)
            )
            once = _reads(node, name.id) == 1 == _reads(second, name.id)
            if not (once and is_path) and not (is_whole and _reads(second, name.id) == 1):
                continue
            replaced = _Replaced({name.id: value}).visit(copy.deepcopy(second))
            if _fits(replaced):
                node.body[number : number + 2] = [replaced]
                break
    return tree


def _aliases(tree: ast.Module) -> ast.Module:
    """Variables that a function sets once, to a number or a definition, are that."""
    defined = {name for node in tree.body for name in names_of(node)}
    for node in ast.walk(tree):
        for each in node.body if isinstance(node, ast.FunctionDef) else []:
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            value = each.value if isinstance(each, ast.Assign) else None
            if not isinstance(target, ast.Name) or value is None or _stores(node, target.id) != 1:
                continue
            if _number(value) is not None or (isinstance(value, ast.Name) and value.id in defined):
                function = cast("ast.FunctionDef", node)
                function.body.remove(each)
                function.body = [_Replaced({target.id: value}).visit(inside) for inside in function.body]
                break
    return tree


def _expressions(tree: ast.Module) -> ast.Module:
    """Functions that return one short expression, or are called once, in the place of their calls."""
    for number, node in enumerate(tree.body):
        if not isinstance(node, ast.FunctionDef) or len(node.body) != 1 or node.decorator_list:
            continue
        value = node.body[0].value if isinstance(node.body[0], ast.Return) else None
        changed = copy.deepcopy(tree)
        calls = _calls(changed, node.name)
        if value is None or not calls or (len(calls) > 1 and len(ast.unparse(value)) > 45):
            continue
        replacements = [_applied(call, node, value) for call in calls]
        if None not in replacements:
            into = {id(call): new for call, new in zip(calls, replacements, strict=True)}
            _Exchanged(into).visit(changed)
            del changed.body[number]
            # The fields of a key become shorter later.
            if all(map(_fits, changed.body)) or isinstance(value, ast.Tuple):
                return changed
    return tree


def _applied(call: ast.Call, function: ast.FunctionDef, value: ast.expr) -> ast.expr | None:
    """The expression that a function returns, for the arguments of a call; None if they would be computed twice."""
    bound = None if ast.unparse(call.func) == "partial" else _bound(call, function, skipped=False)
    if bound is None or None in bound.values():
        return None
    given = cast("dict[str, ast.expr]", bound)
    if any(not _is_simple(each) and not _is_key(each) and _reads(value, name) != 1 for name, each in given.items()):
        return None
    return cast("ast.expr", _Replaced(given).visit(copy.deepcopy(value)))


class _Exchanged(ast.NodeTransformer):
    """Calls, by id, in the place of which another expression stands."""

    def __init__(self, into: Mapping[int, ast.expr | None]) -> None:
        self._into = into

    def visit_Call(self, node: ast.Call) -> ast.expr:
        new = self._into.get(id(node))
        self.generic_visit(node)
        return node if new is None else new


def _bodies(tree: ast.Module) -> ast.Module:
    """Functions that are called once, by a statement that only calls, assigns or returns, in the place of the call."""
    for caller in tree.body:
        for number, statement in enumerate(caller.body if isinstance(caller, ast.FunctionDef) else []):
            call = statement.value if isinstance(statement, ast.Expr | ast.Return | ast.Assign) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            name = call.func.id
            function = next(
                (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name), None
            )
            if function is None or function.decorator_list or _calls(tree, name) != [call]:
                continue
            written = _inlined(statement, call, function, cast("ast.FunctionDef", caller))
            if written is not None and all(map(_fits, written)):
                caller.body[number : number + 1] = written  # type: ignore[attr-defined]
                tree.body.remove(function)
                return tree
    return tree


def _inlined(
    statement: ast.stmt, call: ast.Call, function: ast.FunctionDef, caller: ast.FunctionDef
) -> list[ast.stmt] | None:
    """The body of a function, with the arguments of a call; None if names collide or it returns early."""
    bound = _bound(call, function, skipped=False)
    returns = [each for each in ast.walk(function) if isinstance(each, ast.Return)]
    last = function.body[-1]
    if bound is None or None in bound.values() or returns not in ([], [last]):
        return None
    if isinstance(last, ast.Return) == isinstance(statement, ast.Expr):
        return None
    given = cast("dict[str, ast.expr]", bound)
    direct = {name: value for name, value in given.items() if not _stores(function, name) and (
        _is_simple(value) or _is_key(value) or _is_first(function, name))}  # fmt: skip
    others = [
        ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)
        for name, value in given.items()
        if name not in direct
    ]
    own = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    own |= {name for name in given if name not in direct}
    theirs = {each.id for each in ast.walk(caller) if isinstance(each, ast.Name)} | {
        each.arg for each in ast.walk(caller) if isinstance(each, ast.arg)
    }
    if own & theirs:
        return None
    body = [_Folded({}).visit(_Replaced(direct).visit(copy.deepcopy(each))) for each in function.body]
    if isinstance(last, ast.Return):
        ending = copy.copy(statement)
        ending.value = body[-1].value  # type: ignore[attr-defined]
        body[-1] = ending
    return [*others, *body]


def _is_key(value: ast.expr) -> bool:
    """A tuple that is made of simple expressions: its fields are known."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "BatchKey"


def _is_first(function: ast.FunctionDef, name: str) -> bool:
    """True if the function reads the name once, in its first statement."""
    return _reads(function, name) == 1 == _reads(function.body[0], name) and isinstance(
        function.body[0], ast.Assign | ast.Return
    )


def _overrides(tree: ast.Module) -> ast.Module:
    """Methods that only call the same method of their base class are left out, and then classes without any."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if not _is_trivial(each)] or [ast.Pass()]
    empty = {node.name: node.bases[0] for node in tree.body if isinstance(node, ast.ClassDef)
             and isinstance(node.body[0], ast.Pass) and len(node.bases) == 1}  # fmt: skip
    tree.body = [node for node in tree.body if not empty.keys() & set(names_of(node))]
    return cast("ast.Module", _Replaced(empty).visit(tree))


def _is_trivial(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or len(node.body) != 1 or node.args.kwonlyargs or node.args.defaults:
        return False
    given = ", ".join(each.arg for each in node.args.args[1:])
    return ast.unparse(node.body[0]).removeprefix("return ") == f"super().{node.name}({given})"


def _used(body: list[ast.stmt], kept: Iterable[str]) -> list[ast.stmt]:
    """The statements that define what is kept, and what these use."""
    wanted, reached = set(kept), set[str]()
    while wanted - reached:
        name = (wanted - reached).pop()
        reached.add(name)
        for node in body:
            if name in set(names_of(node)):
                wanted |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return [node for node in body if wanted & set(names_of(node))]


def _number(node: ast.expr) -> float | None:
    sign = -1 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1
    inside = node.operand if isinstance(node, ast.UnaryOp) and sign < 0 else node
    is_number = isinstance(inside, ast.Constant) and type(inside.value) in (int, float)
    return sign * cast("Any", inside).value if is_number else None


def _literal(value: Any) -> ast.expr:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a script has finite literals, got {value}")
    return ast.Constant(value)


def _is_plain(node: ast.expr) -> bool:
    """A literal."""
    if isinstance(node, ast.Tuple):
        return all(map(_is_plain, node.elts))
    return isinstance(node, ast.Constant) or _number(node) is not None


def _is_simple(node: ast.expr) -> bool:
    """A literal, a name, or a tuple of such."""
    if isinstance(node, ast.Tuple):
        return all(map(_is_simple, node.elts))
    return _is_plain(node) or isinstance(node, ast.Name) or (isinstance(node, ast.Starred) and _is_simple(node.value))


def _is_floating(node: ast.expr) -> bool:
    """True if the value has a floating dtype for certain."""
    if isinstance(node, ast.BinOp):
        return _is_floating(node.left) or _is_floating(node.right)
    is_ternary = isinstance(node, ast.Call) and ast.unparse(node.func) == "ternary"
    return is_ternary or isinstance(_number(node), float)


def _spread(values: Sequence[ast.expr]) -> list[ast.expr]:
    """Values without the star before a tuple that is written out."""
    inside = (each.value if isinstance(each, ast.Starred) else None for each in values)
    parts = (
        list(tupled.elts) if isinstance(tupled, ast.Tuple) else [each]
        for tupled, each in zip(inside, values, strict=True)
    )
    return [each for part in parts for each in part]


def _stores(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name and not isinstance(each.ctx, ast.Load)
               for each in ast.walk(node))  # fmt: skip


def _reads(node: ast.AST, name: str) -> int:
    return sum(isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load)
               for each in ast.walk(node))  # fmt: skip


def _fits(node: ast.AST) -> bool:
    return all(len(line) <= _COLUMNS for line in ast.unparse(node).split("\n"))


_RULES: tuple[Callable[[ast.Module], ast.Module], ...] = (
    _constants, _seeds, _attributes, _returned, _aliases, _expressions, _bodies, _overrides,
)  # fmt: skip
