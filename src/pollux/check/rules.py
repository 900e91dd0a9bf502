"""The rules of ``pollux check``: one function each, which yields what it finds."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator

from pollux.api.kind import parse_python
from pollux.check.finding import Finding, Found
from pollux.check.forgotten import counted_by_hand, divided, untracked_best
from pollux.check.script import Script

_CUDA_ID = re.compile(r"cuda:\d+")
_OWN_PARALLEL = {
    "torch.distributed.init_process_group": "train.init() does it",
    "torch.nn.parallel.DistributedDataParallel": "run.prepare(...) does it",
    "torch.nn.DataParallel": "run.prepare(...) replicates the model, one process for each device",
    "torch.utils.data.DistributedSampler": "run.dataloader(...) divides the data",
    "torch.utils.data.distributed.DistributedSampler": "run.dataloader(...) divides the data",
}
_COLLECTIVES = {
    f"torch.distributed.{name}"
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier"),
        *("broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter_tensor", "scatter"),
    )
}
_ENV_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
# Of run.dataloader, and of the ElasticLoader that it makes (a test compares them).
DATALOADER_OPTIONS = {
    *("dataset", "batch_size", "max_batch_size", "device_batch_size", "policy"),
    *("batch_check", "shuffle", "seed", "sampler", "batch_sampler"),
    *("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "drop_last"),
    *("timeout_s", "worker_init_fn", "multiprocessing_context", "auto_commit"),
}


Rule = Callable[[Script], Iterator[Found]]


def check_script(text: str, file: str) -> list[Finding]:
    """What will go wrong with a script, in the order of its lines. A script that is not Python has one finding."""
    tree = parse_python(text)
    if tree is None:
        return [_finding(file, 1, "syntax", Found(ast.Pass(), "it is not Python", "mend its syntax first"))]
    script = Script(tree)
    rules: list[Rule] = [not_pollux]
    if script.runs:
        rules = TRAIN_RULES
    elif script.jobs:
        rules = ELASTIC_RULES
    found = [
        _finding(file, getattr(one.node, "lineno", 1), rule.__name__.replace("_", "-"), one)
        for rule in rules
        for one in rule(script)
    ]
    return sorted(set(found), key=lambda one: (one.line, one.rule))


def _finding(file: str, line: int, rule: str, found: Found) -> Finding:
    return Finding(file=file, line=line, rule=rule, severity=found.severity, problem=found.problem, advice=found.advice)


def not_pollux(script: Script) -> Iterator[Found]:
    """Says nothing of a file that takes the run from another one."""
    if not any(name.startswith(("pollux.train", "pollux.elastic", "pollux.integrations")) for name in script.modules):
        yield Found(
            script.tree,
            "it does not use pollux.train or pollux.elastic, so it becomes a fixed job",
            "begin with: from pollux import train; run = train.init()",
            "warning",
        )


# pollux.train ---------------------------------------------------------------------------------


def stale_rank(script: Script) -> Iterator[Found]:
    """A rank or a size that is read once is wrong after a resize."""
    in_loops = {name for loop in script.training_loops() for name in script.names_in(loop)}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and not script.is_in_training(node):
            is_used = any(ast.unparse(target) in in_loops for target in node.targets)
            if is_used and _has(script, node.value, "world_size"):
                yield Found(
                    node, "the number of replicas is read once; a resize changes it", "use run.world_size itself"
                )
            if is_used and any(_reads_rank(script, part) for part in ast.walk(node.value)):
                yield Found(node, "the rank is read once; a restart changes it", "use run.rank or run.is_main itself")
        name = _environment_name(script, node)
        if name in _ENV_RANKS and script.is_beside_run(node):
            advice = "use run.rank, run.world_size, run.device"
            yield Found(node, f"{name} is that of the start; a resize changes it", advice)
    for call, name in script.calls():
        is_asked = name in ("torch.distributed.get_rank", "torch.distributed.get_world_size")
        if is_asked and script.is_beside_run(call) and not script.is_in_training(call):
            yield Found(call, f"{name} is not right before the loop", "use run.rank, run.is_main or run.world_size")


def made_by_one_replica(script: Script) -> Iterator[Found]:
    """A name that rank 0 alone has before the loop is missing on the replica that is rank 0 later."""
    loops = script.training_loops()
    used = {name for loop in loops for name in script.names_in(loop)}
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.If) or not script.asks_rank(node.test) or script.is_in_training(node):
            continue
        if any(node.lineno > loop.lineno for loop in loops) or node.orelse:
            continue
        for statement in node.body:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                name = ast.unparse(target)
                values = script.assignments_to(name)
                if name in used and len(values) == 1:
                    yield Found(
                        statement,
                        f"{name} is made by one replica before the loop; another may take its place",
                        f"make {name} on every replica, or when it is first used",
                    )


def own_parallelism(script: Script) -> Iterator[Found]:
    for call, name in script.calls():
        if name in _OWN_PARALLEL and script.is_beside_run(call):
            yield Found(
                call, f"{name.rpartition('.')[2]} cannot follow a resize", f"leave it out: {_OWN_PARALLEL[name]}"
            )


def not_prepared(script: Script) -> Iterator[Found]:
    """Models, optimizers and schedulers that train without the others knowing."""
    prepares = [node for node, _ in script.calls() if script.is_of_run(node.func, "prepare")]
    if not prepares:
        loops = script.training_loops()
        if loops and not _may_be_prepared_elsewhere(script):
            first = min(loops, key=lambda loop: loop.lineno)
            problem = "run.prepare is never called: the job ends with an error when this loop begins"
            yield Found(first, problem, f"write before it: {_prepare_line(script)}")
        return
    given = {
        name
        for call in prepares
        for value in [*call.args, *(keyword.value for keyword in call.keywords)]
        for name in script.names_in(value)
    }
    for call in prepares:
        if isinstance(script.parent(call), ast.Expr):
            yield Found(call, "what run.prepare returns is not used", "write: model, optimizer = run.prepare(...)")
        yield from _unpacked(script, call)
    if any(isinstance(value, ast.Starred) for call in prepares for value in call.args):
        return
    for call, name in script.calls():
        target = _target_of(script, call)
        if target is None or target in given or not script.is_beside_run(call):
            continue
        if target in script.optimizers and name.startswith("torch.optim."):
            yield Found(call, f"optimizer {target} is not prepared: replicas drift apart", _prepare_advice(target))
            continue
        if target in script.schedulers:
            advice = f"give it to run.prepare(model, optimizer, {target})"
            yield Found(call, f"{target} does not follow a batch that grows, nor a restart", advice, "warning")
        if target in script.scalers:
            advice = f"give it to run.prepare(..., grad_scaler={target})"
            yield Found(call, f"{target} is not prepared: its scale is lost in a restart", advice, "warning")
    for call, name in script.calls():
        is_given = name.startswith("torch.optim.") and _target_of(script, call) in given
        if not is_given or not script.is_beside_run(call):
            continue
        for part in ast.walk(call):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "parameters":
                module = ast.unparse(part.func.value)
                if isinstance(part.func.value, ast.Name) and module not in given:
                    yield Found(
                        call, f"model {module} is not prepared: its replicas drift apart", _prepare_advice(module)
                    )


def _unpacked(script: Script, call: ast.Call) -> Iterator[Found]:
    """What run.prepare returns is two values, with a scheduler too; other libraries return all that they are given."""
    parent = script.parent(call)
    for target in parent.targets if isinstance(parent, ast.Assign) else ():
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        if len(names) <= 2 or any(isinstance(name, ast.Starred) for name in names):
            continue
        taken, given = [ast.unparse(name) for name in names[:2]], [ast.unparse(value) for value in call.args]
        is_usual = given[:2] == taken and len(given) <= 3 and len(names) == 3
        line = f"{', '.join(taken)} = {ast.unparse(call)}" if is_usual else _prepare_line(script)
        problem = f"run.prepare returns the model and the optimizer, not {len(names)} values"
        yield Found(call, f"{problem}; the scheduler is changed in place", f"write: {line}")


def own_data(script: Script) -> Iterator[Found]:
    """Every replica would train on all the data, or begin at epoch 0 again."""
    for loop in (node for node in ast.walk(script.tree) if isinstance(node, ast.For)):
        trains = any(
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "backward"
            and script.around(call, ast.For)[:1] == [loop]
            for call, _ in script.calls(loop)
        )
        if trains and script.is_beside_run(loop) and script.names_in(loop.iter) & script.torch_loaders:
            advice = "make it by run.dataloader(dataset, batch_size=...)"
            yield Found(loop, "every replica trains on all the data of this DataLoader", advice)
        if script.names_in(loop.iter) & script.loaders:
            for outer in script.around(loop, ast.For):
                is_range = isinstance(outer.iter, ast.Call) and script.full_name(outer.iter.func) == "range"
                if is_range and not script.is_training(outer):
                    advice = f"write: for {ast.unparse(outer.target)} in run.epochs(...)"
                    yield Found(outer, "a restart begins this loop at its first epoch again", advice)


def unknown_option(script: Script) -> Iterator[Found]:
    """An argument that run.dataloader does not take."""
    for call, _ in script.calls():
        for name in (keyword.arg for keyword in call.keywords) if script.is_of_run(call.func, "dataloader") else ():
            if name is not None and name not in DATALOADER_OPTIONS:
                close = difflib.get_close_matches(name, DATALOADER_OPTIONS, 1, cutoff=0.68)
                advice = f"did you mean {close[0]}?" if close else "leave it out, or see help(train.Run.dataloader)"
                yield Found(call, f"run.dataloader takes no {name}", advice)


def counted_passes(script: Script) -> Iterator[Found]:
    """A loader gives one batch for each pass; a step may have several."""
    for loop in script.training_loops():
        index = _index_of(script, loop)
        for node in ast.walk(loop):
            if isinstance(node, ast.If) and _divides(node.test):
                for call, _ in script.calls(node):
                    is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
                    if (
                        is_step
                        and isinstance(call.func, ast.Attribute)
                        and ast.unparse(call.func.value) in script.optimizers
                    ):
                        advice = "call optimizer.step() in every pass; run.dataloader(device_batch_size=...) bounds one"
                        yield Found(call, "gradients are accumulated twice, here and by Pollux", advice)
                        break
                else:
                    if index is not None and index in {ast.unparse(part) for part in ast.walk(node.test)}:
                        yield Found(
                            node, f"{index} counts passes, not steps", "use run.every(n) or run.num_steps", "warning"
                        )


def own_collectives(script: Script) -> Iterator[Found]:
    """A collective of the user's own ends with an error when a replica is lost in it."""
    for call, name in script.calls():
        if name not in _COLLECTIVES or not script.is_in_training(call):
            continue
        if not any(
            isinstance(part, ast.Call) and script.is_of_run(part.func, "attempt")
            for block in script.around(call, ast.With)
            for item in block.items
            for part in ast.walk(item.context_expr)
        ):
            is_in_pass = any(script.is_in_pass(loop) for loop in script.around(call, ast.For))
            yield Found(
                call,
                f"if a replica is lost in this {name.rpartition('.')[2]}, the others end with an error",
                # Between passes nothing repeats the body of an attempt.
                "put the loop's body into: with run.attempt():" if is_in_pass else "use run.sum or run.mean",
                "warning",
            )


def untracked_average(script: Script) -> Iterator[Found]:
    """An average of the weights that neither a new replica nor a restart would get."""
    used = {name for loop in script.training_loops() for name in script.names_in(loop)}
    tracked = {
        name
        for call, _ in script.calls()
        if script.is_of_run(call.func, "track")
        for value in call.args
        for name in script.names_in(value)
    }
    for call, name in script.calls():
        target = _target_of(script, call)
        is_average = name in ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")
        if is_average and target in used - tracked and script.is_beside_run(call) and not script.is_in_training(call):
            yield Found(
                call,
                f"{target} is not tracked: a replica that joins and a restart begin with the first one",
                f"run.track({target!r}, {target}), and update it if run.is_last_pass",
                "warning",
            )


def local_averages(script: Script) -> Iterator[Found]:
    """A sum over this replica's share, divided by the length of all the data."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = node.right
            if isinstance(node.left, ast.Call) and script.is_of_run(node.left.func, "sum"):
                continue
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.value
        else:
            continue
        for call, name in script.calls(divisor):
            if name != "len" or not call.args:
                continue
            of = ast.unparse(call.args[0])
            if of in script.loaders or of.removesuffix(".dataset") in script.loaders:
                advice = "use run.mean(value, weight=number of examples) or run.sum(...)"
                yield Found(node, f"a replica has seen only its share of len({of})", advice, "warning")


def closures(script: Script) -> Iterator[Found]:
    for call, name in script.calls():
        if name == "torch.optim.LBFGS":
            advice = "use an optimizer that needs no closure, or submit the job with --max-replicas 1"
            yield Found(call, "LBFGS calls its closure as often as it likes: one replica and one pass only", advice)


def device_ids(script: Script) -> Iterator[Found]:
    """A replica has the device that Pollux gives it."""
    advice = "use run.device"
    for call, name in script.calls():
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [value.value for value in values if isinstance(value, ast.Constant)]
        named = [text for text in texts if isinstance(text, str) and _CUDA_ID.fullmatch(text)]
        if named:
            yield Found(call, f"{named[0]!r} is one device for all replicas of a machine", advice)
        is_number = any(isinstance(text, int) and not isinstance(text, bool) for text in texts)
        if is_number and (name == "torch.cuda.set_device" or _method(call) == "cuda"):
            yield Found(call, "a device by its number is one for all replicas of a machine", advice)
        for keyword in call.keywords:
            if keyword.arg == "device_ids":
                yield Found(
                    call, "device_ids name the same devices on all replicas", "leave it out: run.prepare knows them"
                )


def every_replica_writes(script: Script) -> Iterator[Found]:
    prints_once = any(
        (name == "pollux.train.init" and _is_true(call, "print_once")) or script.is_of_run(call.func, "print_once")
        for call, name in script.calls()
    )
    for call, name in script.calls():
        if not script.is_in_training(call) or script.is_for_one_replica(call):
            continue
        if name == "print" and not prints_once:
            yield Found(call, "every replica prints this", "use run.print(...)", "warning")
        if name == "torch.save":
            yield Found(call, "every replica writes this file, at the same time", "use run.save(obj, path)")


def logs_nothing(script: Script) -> Iterator[Found]:
    """Nobody sees from outside how the training goes."""
    loops = script.training_loops()
    logs = any(script.is_of_run(node, "log") for node in ast.walk(script.tree))
    if loops and not logs and not _is_given_away(script):
        first = min(loops, key=lambda loop: loop.lineno)
        problem = "run.log is never called: ls, describe and the dashboard will show no metric"
        yield Found(first, problem, f"call {min(script.runs)}.log(loss=...) in the loop", "hint")


def own_seeds(script: Script) -> Iterator[Found]:
    for call, name in script.calls():
        if name.rpartition(".")[2] in ("manual_seed", "manual_seed_all") and script.is_in_training(call):
            advice = "seed once, before train.init(); each replica has a stream of its own"
            yield Found(call, "a seed inside the loop repeats the same random numbers", advice, "warning")


def swallowed_leave(script: Script) -> Iterator[Found]:
    """Leaving is an exception like SystemExit."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Try) or not any(loop in list(ast.walk(node)) for loop in script.training_loops()):
            continue
        for handler in node.handlers:
            catches_all = handler.type is None or script.full_name(handler.type) in ("BaseException", "SystemExit")
            raises = any(isinstance(part, ast.Raise) for part in ast.walk(handler))
            if catches_all and not raises:
                yield Found(handler, "it also catches the request to leave", "catch Exception, or raise again")


def own_signals(script: Script) -> Iterator[Found]:
    for call, name in script.calls():
        if name == "signal.signal" and any("SIGTERM" in ast.unparse(value) for value in call.args):
            yield Found(
                call, "SIGTERM is how Pollux asks for a checkpoint", "leave it to train.init() or elastic.join()"
            )


# pollux.elastic -------------------------------------------------------------------------------


def never_leaves(script: Script) -> Iterator[Found]:
    used = {node.attr for node in ast.walk(script.tree) if isinstance(node, ast.Attribute)}
    joined = next(call for call, name in script.calls() if name == "pollux.elastic.join")
    for names, problem, advice in (
        (
            {"should_leave", "is_asked_to_leave"},
            "it never asks whether to leave",
            "if job.should_leave(): save, job.leave()",
        ),
        (
            {"load_state_dict"},
            "it does not go on where the last start stopped",
            "job.load_state_dict(...) of what was saved",
        ),
        ({"step"}, "it never says that a step is done", "call job.step() after every optimizer step"),
    ):
        if not names & used:
            yield Found(joined, problem, advice)


TRAIN_RULES: list[Rule] = [
    stale_rank,
    made_by_one_replica,
    own_parallelism,
    not_prepared,
    own_data,
    unknown_option,
    counted_passes,
    counted_by_hand,
    own_collectives,
    untracked_average,
    untracked_best,
    local_averages,
    closures,
    device_ids,
    every_replica_writes,
    logs_nothing,
    own_seeds,
    swallowed_leave,
    own_signals,
]
ELASTIC_RULES: list[Rule] = [never_leaves, own_signals]


# Helpers --------------------------------------------------------------------------------------


def _has(script: Script, node: ast.AST, attribute: str) -> bool:
    return any(script.is_of_run(part, attribute) for part in ast.walk(node))


def _reads_rank(script: Script, node: ast.AST) -> bool:
    """``int(run.rank)``, ``not run.is_main``, ``run.rank == 0 and verbose``: the value of this moment alone."""
    if isinstance(node, ast.Call):
        tested = node.args[:1] if script.full_name(node.func) in ("int", "bool") else []
    elif isinstance(node, ast.UnaryOp):
        tested = [node.operand] if isinstance(node.op, ast.Not) else []
    elif isinstance(node, ast.BoolOp):
        tested = node.values
    else:
        tested = [node.test] if isinstance(node, ast.IfExp) else []
    return any(_has(script, one, "rank") or _has(script, one, "is_main") for one in tested)


def _environment_name(script: Script, node: ast.AST) -> str:
    """The variable that ``os.environ["RANK"]``, ``os.environ.get("RANK")`` or ``os.getenv("RANK")`` reads."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and script.full_name(node.value) == "os.environ":
        key = node.slice
    elif isinstance(node, ast.Call) and script.full_name(node.func) in ("os.environ.get", "os.getenv") and node.args:
        key = node.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _target_of(script: Script, call: ast.Call) -> str | None:
    """The name that a call's value is given."""
    parent = script.parent(call)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return ast.unparse(parent.targets[0])
    return ast.unparse(parent.target) if isinstance(parent, ast.AnnAssign) else None


def _prepare_advice(name: str) -> str:
    return f"give {name} to run.prepare; several models and optimizers as tuples"


def _prepare_line(script: Script) -> str:
    """What the script has to say, with its own names where they are seen."""
    run = min(script.runs)
    models: dict[str, str] = {}  # by the optimizer that has their weights
    for call, name in script.calls():
        if (target := _target_of(script, call)) in script.optimizers and name.startswith("torch.optim."):
            owners = [
                ast.unparse(part.func.value)
                for part in ast.walk(call)
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and _method(part) == "parameters"
            ]
            models[str(target)] = owners[0] if owners else "model"
    optimizers = ", ".join(models) or "optimizer"
    names = ", ".join(models.values()) or "model"
    if len(models) > 1:
        return f"({names}), ({optimizers}) = {run}.prepare(({names}), ({optimizers}))"
    schedules = sorted(
        {target for call, _ in script.calls() if (target := _target_of(script, call))} & script.schedulers
    )
    rest = "".join(f", {name}" for name in schedules[:1])
    return f"{names}, {optimizers} = {run}.prepare({names}, {optimizers}{rest})"


def _may_be_prepared_elsewhere(script: Script) -> bool:
    return _is_given_away(script) or any(_method(call) == "prepare" for call, _ in script.calls())


def _is_given_away(script: Script) -> bool:
    """Whether the run goes to code that is not in this file."""
    if any(name.startswith("pollux.integrations") for name in script.modules):
        return True
    seen = {
        node.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and not node.bases)
    }
    for call, name in script.calls():
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name not in seen and any(ast.unparse(one) in script.runs for one in given):
            return True
    return False


def _index_of(script: Script, loop: ast.For) -> str | None:
    """``i`` of ``for i, batch in enumerate(loader)``."""
    if not isinstance(loop.iter, ast.Call) or script.full_name(loop.iter.func) != "enumerate":
        return None
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else None
    return first.id if isinstance(first, ast.Name) and script.names_in(loop.iter) & script.loaders else None


def _divides(test: ast.expr) -> bool:
    return bool(divided(test))


def _is_true(call: ast.Call, option: str) -> bool:
    return any(word.arg == option and ast.unparse(word.value) == "True" for word in call.keywords)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
