"""Rules of ``pollux check`` about variables that a restart forgets: counters of steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pollux.check.finding import Found
from pollux.check.script import Script

_TELL = {
    *("print", "log", "info", "debug", "warning", "write", "set_postfix", "set_description", "format"),
    *("add_scalar", "add_scalars", "add_image", "log_metrics", "log_dict", "save"),
}
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
    function = next((one for one in script.parents(node) if isinstance(one, ast.FunctionDef)), None)
    if function is None or name.startswith("self."):
        return True
    declared = [one for one in ast.walk(function) if isinstance(one, ast.Global | ast.Nonlocal)]
    return any(name in one.names for one in declared)


def is_tracked(script: Script, name: str) -> bool:
    """By ``run.track``, as itself or as a part of what is. Of ``self``, whose name outside is not known: any is."""
    tracks = [call for call, _ in script.calls() if isinstance(call.func, ast.Attribute) and call.func.attr == "track"]
    tracked = {one for call in tracks for value in call.args for one in script.names_in(value)}
    return bool({name, *_roots(name)} & tracked) or (name.startswith("self.") and bool(tracks))


def _roots(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b['c']`` of ``a.b['c'].d``"""
    for index, letter in enumerate(name):
        if letter in ".[":
            yield name[:index]
