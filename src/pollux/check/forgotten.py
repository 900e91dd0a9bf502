"""Rules of ``pollux check`` about variables that a restart forgets: counters of steps, and the best result so far."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pollux.check.finding import Found
from pollux.check.script import Script

_TELL = {
    *("print", "log", "info", "debug", "warning", "write", "set_postfix", "set_description", "format"),
    *("add_scalar", "add_scalars", "add_image", "log_metrics", "log_dict", "save"),
}
_BEST = re.compile("best|lowest|highest", re.IGNORECASE)
_SAVES = re.compile("save|checkpoint|copyfile|deepcopy", re.IGNORECASE)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SUMS = {"mean", "sum", "max", "min"}  # what is divided by a number of passes


def counted_by_hand(script: Script) -> Iterator[Found]:
    """``step += 1`` in the loop, and ``step % n``, a log, the name of a file or the end of training by it."""
    for loop in script.training_loops():
        if not script.is_in_pass(loop):
            continue
        counted = _increments(loop)
        told: set[str] = set()
        for node in ast.walk(loop):
            tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
            tests += [node] if isinstance(node, ast.Compare | ast.UnaryOp) else []
            found = {name for test in tests for name in divided(test)} & counted.keys() - told
            for name in sorted(found):
                told.add(name)
                problem = f"{name} counts passes of one replica, and begins again in a restart"
                yield Found(node, problem, "use run.every(n) or run.num_steps", "warning")
        for name in sorted(counted.keys() - told):
            outer = outermost(script, counted[name]) or loop
            if not _counts_each_pass(script, counted[name], loop) or not is_kept(script, name, counted[name], outer):
                continue
            use = next((part for part in ast.walk(outer) if _tells(script, part, name)), None)
            if use is not None:
                problem = f"{name} counts passes of one replica, and begins again in a restart"
                is_end = isinstance(use, ast.If)
                advice = "use run.steps(n) in place of the loop" if is_end else "use run.num_steps"
                yield Found(use, problem, advice, "warning")


def divided(test: ast.expr) -> list[str]:
    """What stands before the ``%`` signs, and the names in it."""
    return [
        ast.unparse(part)
        for node in ast.walk(test)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        for part in ast.walk(node.left)
        if isinstance(part, ast.expr)
    ]


def _increments(loop: ast.AST) -> dict[str, ast.stmt]:
    """``step += 1`` and ``step = step + 1``, by what is counted."""
    found: dict[str, ast.stmt] = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.value) == "1":
            found.setdefault(ast.unparse(node.target), node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = ast.unparse(node.targets[0])
            if ast.unparse(node.value) in (f"{name} + 1", f"1 + {name}"):
                found.setdefault(name, node)
    return found


def _counts_each_pass(script: Script, node: ast.stmt, loop: ast.For) -> bool:
    """Not some event, which a variable may well count, nor the batches of an evaluation."""
    if script.around(node, ast.For, ast.While)[:1] != [loop]:
        return False
    tests = [branch.test for branch in script.around(node, ast.If) if loop in script.around(branch, ast.For)]
    trains = any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "backward" for call, _ in script.calls(loop)
    )
    is_always = all("is_last_pass" in ast.unparse(test) for test in tests)
    return is_always and (trains or script.is_beside_run(loop))


def _tells(script: Script, node: ast.AST, name: str) -> bool:
    """Whether the counter itself is logged, printed or in a name here, or ends the loop."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
        sides = [ast.unparse(side) for side in (node.test.left, *node.test.comparators)]
        ends = any(isinstance(part, ast.Break | ast.Return) for line in node.body for part in ast.walk(line))
        return ends and name in sides
    if not isinstance(node, ast.expr) or ast.unparse(node) != name:
        return False
    below: ast.AST = node
    for parent in script.parents(node):
        if isinstance(parent, ast.JoinedStr):
            return True
        if isinstance(parent, ast.Call) and below is not parent.func:
            called = parent.func.attr if isinstance(parent.func, ast.Attribute) else ast.unparse(parent.func)
            if called in _TELL and not script.full_name(parent.func).startswith(("math.", "numpy.", "torch.log")):
                return True
            if called in _SUMS:
                return False
        is_divisor = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div) and below is parent.right
        if is_divisor or isinstance(parent, ast.Compare | ast.stmt):
            return False
        below = parent
    return False


def untracked_best(script: Script) -> Iterator[Found]:
    """``if accuracy > best: best = accuracy``, and saving: after a restart the first result is the best one."""
    told: set[str] = set()
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign):
            continue
        for name, value in _pairs(node):
            outer = outermost(script, node) or _called_in(script, node, name)
            if name in told or outer is None or not _keeps_best(script, node, name, value):
                continue
            # A script that begins with another value may have read it from a file.
            begins = [one for one in script.assignments_to(name) if not _is_after(script, one, outer, node)]
            if is_kept(script, name, node, outer) and all(map(_is_plain, begins)):
                told.add(name)
                problem = f"{name} begins anew in a restart: the first result then counts as the best and replaces it"
                yield Found(node, problem, _track_advice(script, name, begins), "warning")


def _track_advice(script: Script, name: str, begins: list[ast.expr]) -> str:
    root = name.partition("[")[0]
    if root != name and not root.startswith("self."):
        return f'before the loop: {min(script.runs)}.track("{root.rpartition(".")[2]}", {root})'
    key = re.sub("_?best_?", "", name.rpartition(".")[2]) if root == name else ""
    key, begin = key or "value", ast.unparse(begins[0]) if begins else "0.0"
    made = f'best = {min(script.runs)}.track("best", {{"{key}": {begin}}})'
    return f'before the loop: {made}; then use best["{key}"]'


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(map(ast.unparse, target.elts), node.value.elts, strict=False)
        elif not isinstance(target, ast.Tuple):
            yield ast.unparse(target), node.value


def _keeps_best(script: Script, node: ast.Assign, name: str, value: ast.expr) -> bool:
    """Whether this line takes a value over because it is larger, or smaller, than the one before."""
    is_named = _BEST.search(name) is not None
    if isinstance(value, ast.Call) and script.full_name(value.func) in ("max", "min"):
        given = [ast.unparse(one) for one in value.args]
        return name in given and len(given) > 1 and (is_named or _saves_by(script, node, name))
    branches: list[ast.If | ast.IfExp] = [*script.around(node, ast.If)]
    if isinstance(value, ast.IfExp):
        branches, value = [value], value.body
    taken = ast.unparse(_bare(value))
    for branch in branches:
        for test in ast.walk(branch.test):
            if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], _ORDER):
                continue
            sides = [ast.unparse(_bare(side)) for side in (test.left, *test.comparators)]
            parts = {ast.unparse(part) for part in ast.walk(test) if isinstance(part, ast.expr)}
            if is_named and name in parts and taken in parts - {name}:
                return True
            if name in sides and taken in sides and taken != name and isinstance(branch, ast.If) and _saves(branch):
                return True
    return False


def _bare(value: ast.expr) -> ast.expr:
    """``loss`` of ``loss.item()`` and ``float(loss)``"""
    while isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and not value.args:
            value = value.func.value
        elif isinstance(value.func, ast.Name) and value.func.id in ("float", "int", "round") and value.args:
            value = value.args[0]
        else:
            break
    return value


def _saves(branch: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and _SAVES.search(ast.unparse(part.func)) for part in ast.walk(branch))


def _saves_by(script: Script, node: ast.AST, name: str) -> bool:
    outer = outermost(script, node)
    return outer is not None and any(
        isinstance(part, ast.If) and name in script.names_in(part.test) and _saves(part) for part in ast.walk(outer)
    )


def _is_plain(value: ast.expr) -> bool:
    """A value to begin with: a number, None, infinity."""
    if isinstance(value, ast.UnaryOp):
        return _is_plain(value.operand)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("float", "torch.tensor") and all(map(_is_plain, value.args))
    is_limit = isinstance(value, ast.Attribute) and value.attr.lower() in ("inf", "maxsize", "infty", "max", "min")
    return is_limit or isinstance(value, ast.Constant)


def _is_after(script: Script, value: ast.expr, outer: ast.For, node: ast.AST) -> bool:
    """Whether a value is given in the loop, or in the function that the loop calls."""
    function = _function_of(script, node)
    is_called = outer not in script.around(node, ast.For)
    return outer in script.around(value, ast.For) or (is_called and _function_of(script, value) is function)


def _function_of(script: Script, node: ast.AST) -> ast.FunctionDef | None:
    return next((one for one in script.parents(node) if isinstance(one, ast.FunctionDef)), None)


def _called_in(script: Script, node: ast.AST, name: str) -> ast.For | None:
    """The training loop that calls the function that a line is in, if the name outlives the call."""
    function = _function_of(script, node)
    if function is None or not is_shared(script, name, node):
        return None
    owner = script.parent(function)
    called = {function.name}
    if isinstance(owner, ast.ClassDef):
        if any(isinstance(one, ast.FunctionDef) and one.name == "state_dict" for one in owner.body):
            return None  # made to be kept
        called = {f"self.{function.name}"}
        for call, made in script.calls():
            parent = script.parent(call)
            if made == owner.name and isinstance(parent, ast.Assign):
                instance = ast.unparse(parent.targets[0])
                called.add(instance if function.name == "__call__" else f"{instance}.{function.name}")
    for loop in script.training_loops():
        if any(ast.unparse(call.func) in called for call, _ in script.calls(loop)):
            return outermost(script, loop) or loop
    return None


# Of both ---------------------------------------------------------------------------------------


def outermost(script: Script, node: ast.AST) -> ast.For | None:
    """The training loop around a line that is in no other one."""
    loops = [loop for loop in script.around(node, ast.For) if script.is_training(loop)]
    return loops[-1] if loops else None


def is_kept(script: Script, name: str, node: ast.AST, outer: ast.For) -> bool:
    """Whether a variable begins before training, and nothing but a turn of the loop changes it.

    False if it is tracked, begins anew inside the loop, or in each call of a function that has the loop over one epoch.
    """
    if is_tracked(script, name):
        return False
    if any(name in script.names_in(loop.target) for loop in (outer, *script.around(node, ast.For))):
        return False
    values = script.assignments_to(name)
    if any(isinstance(value, ast.Constant) and outer in script.around(value, ast.For) for value in values):
        return False
    counts = any(script.is_of_run(part, "epochs") or script.is_of_run(part, "steps") for part in ast.walk(outer.iter))
    return counts or is_shared(script, name, node)


def is_shared(script: Script, name: str, node: ast.AST) -> bool:
    """Whether a name outlives a call of the function it is in: a global one, or an attribute of ``self``."""
    function = _function_of(script, node)
    if function is None or name.startswith("self."):
        return True
    declared = [one for one in ast.walk(function) if isinstance(one, ast.Global | ast.Nonlocal)]
    return any(name in one.names for one in declared)


def is_tracked(script: Script, name: str) -> bool:
    """By ``run.track``, as itself or as a part of what is. Of ``self``, whose name outside is not known: any is."""
    tracks = [call for call, _ in script.calls() if isinstance(call.func, ast.Attribute) and call.func.attr == "track"]
    tracked = {one for call in tracks for value in call.args for one in script.names_in(value)}
    tracked |= script.names_given(tracks)
    return bool({name, *_roots(name)} & tracked) or (name.startswith("self.") and bool(tracks))


def _roots(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b['c']`` of ``a.b['c'].d``"""
    for index, letter in enumerate(name):
        if letter in ".[":
            yield name[:index]
