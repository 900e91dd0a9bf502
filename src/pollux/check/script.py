"""What the rules ask about a script: which names are the run, its loaders, optimizers and models, and where a line is.

Names are known by what is assigned to them anywhere in the file. A name that means two things may be judged wrongly;
the rules are written so that this makes them silent rather than loud.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import TypeVar

_N = TypeVar("_N", bound=ast.AST)
Loop = ast.For | ast.While


class Script:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._imported = dict(self._imports())
        self.runs = self._names_of("pollux.train.init")
        self.jobs = self._names_of("pollux.elastic.join")
        self.loaders = self._made_by("dataloader")
        self.torch_loaders = self._names_of("torch.utils.data.DataLoader") - self.loaders
        self.schedulers = self._named_like("torch.optim.lr_scheduler.")
        averages = self._named_like("torch.optim.swa_utils.")  # AveragedModel and SWALR
        self.optimizers = self._named_like("torch.optim.") - self.schedulers - averages
        self.scalers = self._names_of("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")

    # --- names --------------------------------------------------------------------------------------------------

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    @property
    def modules(self) -> set[str]:
        """Full names of all that is imported."""
        found = set(self._imported.values())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
        return found

    def full_name(self, node: ast.AST) -> str:
        """Of ``torch.optim.SGD`` or ``optim.SGD``, as it was imported; "" if it is not such a name."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def calls(self, within: ast.AST | None = None) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the full name of what it calls."""
        for node in ast.walk(within or self.tree):
            if isinstance(node, ast.Call):
                yield node, self.full_name(node.func)

    def _assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """Names, and values that they are given. ``a, b = c, d`` by place."""
        for node in ast.walk(self.tree):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                pairs = [(node.optional_vars, node.context_expr)]
            for target, value in pairs:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    for one, other in zip(target.elts, value.elts, strict=False):
                        yield ast.unparse(one), other
                else:
                    yield ast.unparse(target), value

    def _names_of(self, *functions: str) -> set[str]:
        return {
            name
            for name, value in self._assigned()
            if isinstance(value, ast.Call) and self.full_name(value.func) in functions
        }

    def _named_like(self, prefix: str) -> set[str]:
        return {
            name
            for name, value in self._assigned()
            if isinstance(value, ast.Call) and self.full_name(value.func).startswith(prefix)
        }

    def _made_by(self, method: str) -> set[str]:
        return {
            name
            for name, value in self._assigned()
            if isinstance(value, ast.Call) and self.is_of_run(value.func, method)
        }

    def is_of_run(self, node: ast.AST, attribute: str) -> bool:
        """``run.attribute``"""
        is_named = isinstance(node, ast.Attribute) and node.attr == attribute
        return is_named and isinstance(node, ast.Attribute) and ast.unparse(node.value) in self.runs

    def assignments_to(self, name: str) -> list[ast.expr]:
        return [value for known, value in self._assigned() if known == name]

    def names_given(self, values: Collection[ast.expr]) -> set[str]:
        """The names that are given one of these expressions."""
        return {name for name, value in self._assigned() if value in values}

    # --- places -------------------------------------------------------------------------------------------------

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the inside to the outside."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def around(self, node: ast.AST, *kinds: type[_N]) -> list[_N]:
        """Those of these kinds that the node is in, within its function."""
        found: list[_N] = []
        for parent in self.parents(node):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(parent, kinds):
                found.append(parent)
        return found

    def is_beside_run(self, node: ast.AST) -> bool:
        """Whether the function that a line is in uses the run, or the line is in none: other functions may be plain."""
        function = next(
            (parent for parent in self.parents(node) if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)),
            None,
        )
        return function is None or bool(self.names_in(function) & self.runs)

    def training_loops(self) -> list[ast.For]:
        """``for`` over a loader of the run, ``run.epochs`` or ``run.steps``."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.For) and self.is_training(node)]

    def is_in_pass(self, loop: ast.For) -> bool:
        """Whether each turn of this loop is a pass: over a loader of the run, or ``run.steps``."""
        is_counting = any(self.is_of_run(node, "steps") for node in ast.walk(loop.iter))
        return is_counting or bool(self.names_in(loop.iter) & self.loaders)

    def is_training(self, loop: ast.AST) -> bool:
        if not isinstance(loop, ast.For):
            return False
        if any(self.is_of_run(node, "epochs") or self.is_of_run(node, "steps") for node in ast.walk(loop.iter)):
            return True
        return bool(self.names_in(loop.iter) & self.loaders)

    def is_in_training(self, node: ast.AST) -> bool:
        return any(self.is_training(loop) for loop in self.around(node, ast.For))

    def names_in(self, node: ast.AST) -> set[str]:
        """Names and dotted names."""
        return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}

    def asks_rank(self, node: ast.AST) -> bool:
        """Whether an expression depends on the rank, directly or by a name that was compared with it."""
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr in ("rank", "is_main"):
                return True
            if isinstance(part, ast.Name) and self._is_rank_name(part.id):
                return True
            if isinstance(part, ast.Call) and self.full_name(part.func) == "torch.distributed.get_rank":
                return True
        return False

    def _is_rank_name(self, name: str) -> bool:
        return any(
            isinstance(part, ast.Attribute) and part.attr in ("rank", "is_main")
            for value in self.assignments_to(name)
            for part in ast.walk(value)
        )

    def is_for_one_replica(self, node: ast.AST) -> bool:
        """Whether the line is reached by one replica alone: under a test of the rank, or after a return by others."""
        return any(self.asks_rank(branch.test) for branch in self.around(node, ast.If))
