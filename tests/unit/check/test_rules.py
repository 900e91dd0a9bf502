"""What ``pollux check`` finds in scripts, and what it leaves alone."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest

from pollux.check import check_script
from pollux.check.rules import DATALOADER_OPTIONS

ROOT = Path(__file__).resolve().parents[3]
GOOD = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from pollux import train


def main():
    torch.manual_seed(0)
    run = train.init()
    loader = run.dataloader(dataset, batch_size=32)
    test_loader = DataLoader(test_data)
    model = build().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer = run.prepare(model, optimizer, scheduler)
    master = run.rank == 0
    for epoch in run.epochs(10):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if master:
                print(loss.item())
        scheduler.step()
        for x, y in test_loader:
            correct = (model(x).argmax(1) == y).sum() / len(test_loader.dataset)
        run.log(accuracy=correct)
        if run.is_main:
            print("epoch", epoch)
            torch.save(model.state_dict(), "x.pt")
    print("done")


main()
"""


def found(text: str) -> list[tuple[int, str]]:
    """Errors and warnings."""
    return [(one.line, one.rule) for one in check_script(textwrap.dedent(text), "train.py") if one.severity != "hint"]


def with_line(after: str, *lines: str) -> tuple[str, int]:
    """The good script with lines behind one of it, indented alike; and the number of the first."""
    rows = GOOD.splitlines()
    at = next(number for number, row in enumerate(rows) if after in row) + 1
    indent = " " * (len(rows[at - 1]) - len(rows[at - 1].lstrip()))
    return "\n".join([*rows[:at], *(indent + line for line in lines), *rows[at:]]), at + 1


def test_a_good_script_has_no_findings():
    assert found(GOOD) == []


@pytest.mark.parametrize(
    ("after", "line", "rule"),
    [
        ("master =", "epoch = run.world_size", "stale-rank"),
        ("master =", "epoch = int(run.rank)", "stale-rank"),
        ("master =", "epoch = not run.is_main", "stale-rank"),
        ("master =", "epoch = run.rank == 0 and verbose", "stale-rank"),
        ("master =", "epoch = 'main' if run.is_main else 'other'", "stale-rank"),
        ("master =", "import os; rank = int(os.environ['RANK'])", "stale-rank"),
        ("master =", "import os; local = os.environ.get('LOCAL_RANK', 0)", "stale-rank"),
        ("master =", "torch.distributed.init_process_group('nccl')", "own-parallelism"),
        ("master =", "model = torch.nn.parallel.DistributedDataParallel(model)", "own-parallelism"),
        ("model = build", "second = torch.optim.AdamW(model.parameters())", "not-prepared"),
        ("model = build", "scaler = torch.amp.GradScaler()", "not-prepared"),
        ("optimizer = torch", "other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)", "not-prepared"),
        ("model = build", "lbfgs = torch.optim.LBFGS(model.parameters())", "closures"),
        ("model = build", "model = model.to('cuda:0')", "device-ids"),
        ("model = build", "model = model.cuda(1)", "device-ids"),
        ("model = build", "torch.cuda.set_device(0)", "device-ids"),
        ("loss.backward()", "print(loss)", "every-replica-writes"),
        ("scheduler.step()", "torch.save(model, 'x.pt')", "every-replica-writes"),
        ("loss.backward()", "torch.manual_seed(epoch)", "own-seeds"),
        ("scheduler.step()", "average = total / len(loader)", "local-averages"),
        ("scheduler.step()", "average = total / len(loader.dataset)", "local-averages"),
        ("loss.backward()", "torch.distributed.all_reduce(loss)", "own-collectives"),
        ("master =", "import signal; signal.signal(signal.SIGTERM, print)", "own-signals"),
    ],
)
def test_a_line_that_goes_wrong_is_found(after, line, rule):
    text, number = with_line(after, line)
    assert (number, rule) in found(text)
    assert {line for line, _ in found(text)} == {number}


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("for epoch in run.epochs(10)", "for epoch in range(10)", "own-data"),
        ("loader = run.dataloader(dataset, batch_size=32)", "loader = DataLoader(dataset)", "own-data"),
        ("batch_size=32)", "batch_size=32, max_batchsize=64)", "unknown-option"),
        ("model, optimizer = run.prepare(", "run.prepare(", "not-prepared"),
        ("torch.optim.SGD(model.parameters()", "torch.optim.SGD(other.parameters()", "not-prepared"),
        ("run.prepare(model, optimizer, scheduler)", "run.prepare(model, optimizer)", "not-prepared"),
    ],
)
def test_a_loop_that_goes_wrong_is_found(old, new, rule):
    assert old in GOOD
    assert rule in {name for _, name in found(GOOD.replace(old, new))}


def test_a_loop_without_prepare_is_an_error_that_says_what_to_write():
    kept = [line for line in GOOD.splitlines() if "run.prepare" not in line]
    (one,) = check_script("\n".join(kept), "train.py")
    assert (one.rule, one.severity) == ("not-prepared", "error")
    assert "for epoch in run.epochs(10)" in kept[one.line - 1]
    assert "model, optimizer = run.prepare(model, optimizer, scheduler)" in one.advice


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)",
            "model, optimizer = run.prepare(model, optimizer, scheduler)",
        ),
        (
            "[model, optimizer, s] = run.prepare(model, optimizer, lr_scheduler=scheduler)",
            "model, optimizer = run.prepare(model, optimizer, lr_scheduler=scheduler)",
        ),
        (
            "model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)",
            "model, optimizer = run.prepare(model, optimizer, scheduler)",
        ),
    ],
)
def test_prepare_returns_two_values(line, advice):
    text = GOOD.replace("model, optimizer = run.prepare(model, optimizer, scheduler)", line)
    (one,) = check_script(text, "train.py")
    assert (one.rule, one.severity, text.splitlines()[one.line - 1].strip()) == ("not-prepared", "error", line)
    assert "returns the model and the optimizer" in one.problem
    assert "the scheduler is changed in place" in one.problem
    assert one.advice == f"write: {advice}"


@pytest.mark.parametrize(
    "line",
    [
        "(model, second), (optimizer, other) = run.prepare((model, second), (optimizer, other), scheduler)",
        "model, optimizer, *_ = run.prepare(model, optimizer, scheduler)",
        "model, optimizer, again = *run.prepare(model, optimizer, scheduler), scheduler",
        "prepared = run.prepare(model, optimizer, scheduler); model, optimizer = prepared",
    ],
)
def test_what_prepare_returns_may_be_taken_otherwise(line):
    assert found(GOOD.replace("model, optimizer = run.prepare(model, optimizer, scheduler)", line)) == []


LOOPS = {
    "epochs": "for epoch in run.epochs(3):\n    for x in loader:\n        step(x)",
    "loader": "for x in loader:\n    step(x)",
    "steps": "for i in run.steps(9, batch_size=4):\n    step(i)",
    "pairs": "a = torch.optim.SGD(f.parameters())\nb = torch.optim.Adam(g.parameters())\nfor i in run.steps(9): go(i)",
}


@pytest.mark.parametrize(
    ("loop", "advice"),
    [
        ("epochs", "model, optimizer = run.prepare(model, optimizer)"),
        ("loader", "model, optimizer = run.prepare(model, optimizer)"),
        ("steps", "model, optimizer = run.prepare(model, optimizer)"),
        ("pairs", "(f, g), (a, b) = run.prepare((f, g), (a, b))"),
    ],
)
def test_every_kind_of_loop_needs_prepare(loop, advice):
    text = f"import torch\nfrom pollux import train\nrun = train.init()\nloader = run.dataloader(d)\n{LOOPS[loop]}"
    (one,) = (one for one in check_script(text, "x.py") if one.severity != "hint")
    assert (one.rule, one.severity) == ("not-prepared", "error")
    assert one.advice == f"write before it: {advice}"


@pytest.mark.parametrize(
    "rest",
    [
        "run.log(loss=1.0)",
        "for i in range(3):\n    run.log(loss=i)",
        "from pollux.integrations.huggingface import Trainer\nfor e in run.epochs(2): run.log(loss=1)",
        "from mine import setup\nmodel = setup(run)\nfor e in run.epochs(2): run.log(loss=1)",
        "import mine\nmodel = mine.setup(net, run=run)\nfor e in run.epochs(2): run.log(loss=1)",
        "class T(Base):\n    pass\nt = T(run)\nfor e in run.epochs(2): run.log(loss=1)",
        "def make(r):\n    return r.prepare(net, opt)\nm, o = make(run)\nfor e in run.epochs(2): run.log(loss=1)",
        "loader = run.dataloader(data)",
    ],
)
def test_a_run_that_others_may_prepare_is_left_alone(rest):
    assert found(f"from pollux import train\nrun = train.init()\n{rest}") == []


def test_the_options_of_a_loader_are_those_it_takes():
    from pollux.train.data import ElasticLoader
    from pollux.train.run import Run

    taken = {*inspect.signature(Run.dataloader).parameters, *inspect.signature(ElasticLoader).parameters}
    assert taken - {"self", "options", "shape", "share_order"} == DATALOADER_OPTIONS


def test_accumulation_of_ones_own_and_counted_passes_are_found():
    text = GOOD.replace("for x, y in loader", "for i, (x, y) in enumerate(loader)")
    accumulating = text.replace(
        "            optimizer.step()\n", "            if (i + 1) % 4 == 0:\n                optimizer.step()\n"
    )
    assert "counted-passes" in {name for _, name in found(accumulating)}
    logging = text.replace("            if master:\n", "            if master and i % 100 == 0:\n")
    assert "counted-passes" in {name for _, name in found(logging)}
    assert found(text) == []


BY_HAND = "counted-by-hand"


def test_steps_that_are_counted_by_hand_are_found():
    counting, number = with_line("optimizer.step()", "step += 1", "if step % 100 == 0:", "    run.print(step)")
    assert found(counting) == [(number + 1, BY_HAND)]
    summing, _ = with_line("optimizer.step()", "step += 1")
    assert found(summing) == []
    other, _ = with_line("optimizer.step()", "bad += 1", "if bad > 3 and len(x) % 2 == 0:", "    skip(bad)")
    assert found(other) == []


@pytest.mark.parametrize(
    "use",
    [
        "run.log(loss=loss, step=step)",
        "run.print('step', step)",
        "run.print(f'step {step}: {loss}')",
        "run.print('step %d' % step)",
        "writer.add_scalar('loss', loss, step)",
        "wandb.log({'loss': loss}, step=step)",
        "run.save(model.state_dict(), f'model-{step}.pt')",
        "path = f'model-{step}.pt'",
        "is_due = step % 50 == 0",
        "show = loss if not step % 50 else None",
        "if step >= 1000: break",
    ],
)
@pytest.mark.parametrize("count", ["step += 1", "step = step + 1", "if run.is_last_pass: step += 1"])
def test_a_counter_of_ones_own_that_is_told_is_found(count, use):
    text, number = with_line("optimizer.step()", count, use)
    assert found(text) == [(number + 1, BY_HAND)]
    module, _ = text.replace("def main():", "if True:").rsplit("main()", 1)
    assert found(module) == [(number + 1, BY_HAND)]


def test_a_counter_that_is_told_after_the_epoch_is_found():
    text, number = with_line("scheduler.step()", "run.log(step=step)")
    assert found(text.replace("            optimizer.step()\n", "            optimizer.step(); step += 1\n")) == [
        (number, BY_HAND)
    ]


@pytest.mark.parametrize(
    ("begin", "count", "use"),
    [
        ("pass", "passes += 1", "run.print(total / passes, run.mean(total / max(passes, 1), passes))"),
        ("pass", "passes += 1", "rate = math.log(passes)"),
        ("pass", "epoch += 1", "run.print(epoch)"),
        ("seen = 0", "seen += 1", "run.print(f'{seen} batches of this epoch')"),
        ("pass", "seen += len(x)", "run.print(seen)"),
        ("pass", "if loss > 9: bad += 1", "run.print(bad)"),
        ("pass", "state['step'] += 1", "run.track('state', state); run.log(step=state['step'])"),
        ("pass", "state.step += 1", "run.track('state', state); run.log(step=state.step)"),
    ],
)
def test_what_a_script_may_count(begin, count, use):
    text, _ = with_line("optimizer.step()", count, use)
    assert found(text.replace("        for x, y in loader", f"        {begin}\n        for x, y in loader")) == []


def test_a_counter_of_one_epoch_in_a_function_is_left_alone():
    text = GOOD.replace(
        "def main():",
        "def evaluate(model, loader):\n    n = 0\n    for x, y in loader:\n        n += 1\n    print(f'{n}')\n\n\n"
        "def epoch_of(model, loader):\n    n = 0\n    for x, y in loader:\n        model(x).backward()\n"
        "        n += 1\n        log(f'{n}')\n\n\ndef main():",
    )
    assert found(text) == []
    lasting = text.replace(
        "    n = 0\n    for x, y in loader:\n        model", "    global n\n    for x, y in loader:\n        model"
    )
    assert [rule for _, rule in found(lasting)] == [BY_HAND]


BEST = "untracked-best"
SAVE = "run.save(model.state_dict(), 'best.pt')"


@pytest.mark.parametrize(
    ("begin", "lines"),
    [
        ("best = 0.0", ["if acc > best:", "    best = acc", f"    {SAVE}"]),
        ("best = 0.0", ["if best < acc:", "    best = acc", f"    {SAVE}"]),
        ("best = 0.0", ["if acc > best: best = acc"]),
        ("best = float('inf')", ["if loss.item() < best:", f"    {SAVE}", "    best = loss.item()"]),
        ("best = -math.inf", ["if run.is_main and acc >= best:", "    best, best_epoch = acc, epoch", f"    {SAVE}"]),
        ("best = None", ["if best is None or acc > best + 0.1:", "    best = float(acc)", f"    {SAVE}"]),
        ("best = 0", ["is_best = acc > best", "best = max(best, acc)", "save_checkpoint(model, is_best)"]),
        ("best_loss = 1e9", ["best_loss = min(best_loss, loss)"]),
        ("top = 0.0", ["if acc > top:", f"    {SAVE}", "top = max(top, acc)"]),
        ("top = 0.0", ["if acc > top:", "    top = acc", f"    {SAVE}"]),
        ("best = 0.0", ["best = acc if acc > best else best"]),
        ("state.best = 0.0", ["if acc > state.best:", "    state.best = acc"]),
        ("best, kept = {'a': 0.0}, run.track('kept', {})", ["if acc > best['a']: best['a'] = acc"]),
        ("kept = {'best': 0.0}", ["if acc > kept['best']:", "    kept['best'] = acc"]),
    ],
)
def test_a_best_result_that_is_not_tracked_is_found(begin, lines):
    text, number = with_line("scheduler.step()", *lines)
    text = text.replace("    master = ", f"    {begin}; master = ")
    (one,) = check_script(text, "x.py")
    assert (one.rule, one.severity) == (BEST, "warning")
    assert number <= one.line < number + len(lines)
    assert "run.track(" in one.advice and "before the loop" in one.advice
    module, _ = text.replace("def main():", "if True:").rsplit("main()", 1)
    assert [rule for _, rule in found(module)] == [BEST]


def test_the_advice_for_a_best_result_can_be_written_as_it_is():
    text, _ = with_line("scheduler.step()", "if acc > best: best = acc")
    (one,) = check_script(text.replace("    master = ", "    best = -1.5; master = "), "x.py")
    assert one.advice == 'before the loop: best = run.track("best", {"value": -1.5}); then use best["value"]'
    text, _ = with_line("scheduler.step()", "if acc > kept['a']: kept['a'] = acc; run.save(model, 'x')")
    (one,) = check_script(text, "x.py")
    assert one.advice == 'before the loop: run.track("kept", kept)'


@pytest.mark.parametrize(
    ("begin", "lines"),
    [
        ("best = {'a': 0.0}; run.track('best', best)", ["if acc > best['a']:", "    best['a'] = acc", f"    {SAVE}"]),
        ("best = run.track('best', {'a': 0.0})", ["if acc > best['a']: best['a'] = acc"]),
        ("best, start = run.track('best', {'a': 0.0}), time.time()", ["if acc > best['a']: best['a'] = acc"]),
        ("best: dict = run.track('best', {'a': 0.0})", ["if acc > best['a']: best['a'] = acc"]),
        ("best = Best(); run.track('best', best)", ["if acc > best.value:", "    best.value = acc", f"    {SAVE}"]),
        ("best = torch.load('best.pt')['acc']", ["if acc > best:", "    best = acc", f"    {SAVE}"]),
        ("pass", ["best = 0.0", "for a in accs:", "    if a > best:", "        best = a", SAVE]),
        ("last = time.time()", ["if time.time() - last > 60:", "    last = time.time()", f"    {SAVE}"]),
        ("last = 0.0", ["now = time.time()", "if now - last > 60:", "    last = now", f"    {SAVE}"]),
        ("next_save = 100", ["if run.num_steps > next_save:", "    next_save = run.num_steps + 100", f"    {SAVE}"]),
        ("peak = 0", ["peak = max(peak, torch.cuda.max_memory_allocated())"]),
        ("lr = 1.0", ["if loss > 3: lr = 0.5"]),
        ("goal = 0.9", ["if acc > goal:", f"    {SAVE}"]),
        ("for a in accs:\n        if a > best: best = a", ["pass"]),
    ],
)
def test_a_best_result_that_is_kept_or_needs_not_be(begin, lines):
    text, _ = with_line("scheduler.step()", *lines)
    assert found(text.replace("    master = ", f"    {begin}\n    master = ")) == []


CLASS = """
class Stopper:
    def __init__(self):
        self.best_loss = None
    def {name}(self, loss):
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss = loss
{rest}
"""


@pytest.mark.parametrize(("name", "call"), [("__call__", "stopper(loss)"), ("step", "stopper.step(loss)")])
def test_a_best_result_in_an_object_is_found_unless_it_can_be_kept(name, call):
    used, _ = with_line("scheduler.step()", call)
    used = used.replace("    master = ", "    stopper = Stopper()\n    master = ")
    text = used.replace("def main():", CLASS.format(name=name, rest="") + "\ndef main():")
    assert [rule for _, rule in found(text)] == [BEST]
    assert found(text.replace("    master = ", "    run.track('stopper', stopper)\n    master = ")) == []
    kept = CLASS.format(name=name, rest="    def state_dict(self):\n        return vars(self)")
    assert found(used.replace("def main():", kept + "\ndef main():")) == []


def test_a_best_result_in_a_function_that_the_loop_calls():
    used, _ = with_line("scheduler.step()", "keep(acc)")
    function = "best = 0.0\n\n\ndef keep(acc):\n    {}\n    if acc > best:\n        best = acc\n\n\ndef main():"
    assert [rule for _, rule in found(used.replace("def main():", function.format("global best")))] == [BEST]
    assert found(used.replace("def main():", function.format("best = 1"))) == []


def test_an_average_of_the_model_is_no_optimizer():
    text, _ = with_line("model = build", "ema = torch.optim.swa_utils.AveragedModel(model)")
    assert found(text) == []


@pytest.mark.parametrize("made", ["copy.deepcopy(model)", "torch.optim.swa_utils.AveragedModel(model)"])
def test_an_average_of_the_model_that_is_not_tracked_is_found(made):
    text, number = with_line("model = build", f"import copy; ema = {made}")
    text = text.replace("            optimizer.step()\n", "            optimizer.step()\n            update(ema)\n")
    assert found(text) == [(number, "untracked-average")]
    assert found(text.replace("    master = ", "    run.track('ema', ema)\n    master = ")) == []


def test_a_collective_between_passes_is_a_sum_of_the_runs():
    """An attempt repeats a pass; after the loop it would only hide that the values were not added."""
    advice = {}
    for after in ("loss.backward()", "scheduler.step()"):
        text, number = with_line(after, "torch.distributed.all_reduce(loss)")
        advice[after] = next(one.advice for one in check_script(text, "train.py") if one.line == number)
    assert "run.attempt" in advice["loss.backward()"] and "run.sum" in advice["scheduler.step()"]


def test_ones_own_collectives_are_allowed_in_an_attempt():
    text = GOOD.replace(
        "            loss.backward()\n",
        "            with run.attempt():\n"
        "                parts = [torch.zeros_like(loss) for _ in range(torch.distributed.get_world_size())]\n"
        "                torch.distributed.all_gather(parts, loss)\n"
        "                loss.backward()\n",
    )
    assert found(text) == []


def test_what_one_replica_makes_before_the_loop_is_found():
    text, number = with_line("master =", "if master:", "    writer = Writer()")
    used = text.replace("print(loss.item())", "writer.add(loss.item())")
    assert (number + 1, "made-by-one-replica") in found(used)
    assert found(text) == []  # it is not used in the loop
    other, _ = with_line("master =", "writer = None", "if master:", "    writer = Writer()")
    assert found(other.replace("print(loss.item())", "writer.add(loss.item())")) == []


def test_a_handler_that_swallows_the_request_to_leave_is_found():
    loop = """
        from pollux import train
        run = train.init()
        loader = run.dataloader(data)
        model, optimizer = run.prepare(make(), None)
        try:
            for epoch in run.epochs(1):
                for batch in loader:
                    step(batch)
        except {kind}:
            {body}
    """
    assert [rule for _, rule in found(loop.format(kind="BaseException", body="pass"))] == ["swallowed-leave"]
    assert found(loop.format(kind="BaseException", body="raise")) == []
    assert found(loop.format(kind="Exception", body="pass")) == []


def test_jobs_that_are_restarted_must_go_on_and_leave():
    text = "from pollux import elastic\njob = elastic.join(batch_size=1)\nwhile not job.is_done:\n    job.step()\n"
    (one, other) = check_script(text, "x.py")
    assert {one.problem, other.problem} == {
        "it never asks whether to leave",
        "it does not go on where the last start stopped",
    }


def test_other_scripts():
    assert found("import torch") == [(1, "not-pollux")]
    assert found("from pollux import train\ndef loop(run):\n    print(run)") == []  # the run comes from another file
    assert found("def (") == [(1, "syntax")]


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/elastic/*.py"), *ROOT.glob("tests/e2e/scripts/*.py")]),
    ids=lambda path: path.name,
)
def test_our_own_scripts_raise_no_alarm(path):
    errors = [one for one in check_script(path.read_text(), path.name) if one.severity == "error"]
    assert errors == []


def test_what_is_made_in_a_function_without_the_run_is_left_alone():
    text = """
        import torch
        from pollux import train
        def make():
            net = torch.nn.Linear(1, 1)
            return net, torch.optim.SGD(net.parameters(), lr=1)
        def plain(loader):
            torch.nn.DataParallel(net)
        def main():
            run = train.init()
            model, optimizer = make()
            model, optimizer = run.prepare(model, optimizer)
    """
    assert found(text) == []


def test_a_script_that_logs_nothing_gets_a_hint():
    silent = GOOD.replace("        run.log(accuracy=correct)\n", "")
    (one,) = check_script(silent, "train.py")
    assert (one.rule, one.severity) == ("logs-nothing", "hint")
    assert "for epoch in run.epochs(10)" in silent.splitlines()[one.line - 1]
    assert one.advice == "call run.log(loss=...) in the loop"
    assert check_script(silent.replace('print("done")', "report(run.log)"), "train.py") == []
    assert check_script(silent.replace("    master =", "    observe(run)\n    master ="), "train.py") == []
    assert check_script("from pollux import train\nrun = train.init()\n", "train.py") == []


def test_the_command(tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from pollux.cli.app import app

    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text(with_line("master =", "epoch = run.world_size")[0])
    runner = CliRunner()
    answer = runner.invoke(app, ["check", str(good)])
    assert (answer.exit_code, answer.stdout) == (0, "")
    answer = runner.invoke(app, ["check", str(good), str(bad)])
    assert answer.exit_code == 1
    assert f"{bad}:18: error: the number of replicas is read once" in answer.stdout
    assert answer.stderr == "2 read: 1 error, 0 warnings\n"
    good.write_text(GOOD.replace("        run.log(accuracy=correct)\n", ""))
    answer = runner.invoke(app, ["check", str(good)])
    assert (answer.exit_code, answer.stderr) == (0, "1 read: 0 errors, 0 warnings, 1 hint\n")
    assert ": hint: run.log is never called" in answer.stdout
    told = json.loads(runner.invoke(app, ["check", "--json", str(bad)]).stdout)
    assert [(one["line"], one["rule"], one["severity"]) for one in told["findings"]] == [(18, "stale-rank", "error")]
    answer = runner.invoke(app, ["check", str(tmp_path / "none.py")])
    assert answer.exit_code == 2 and "No such file" in answer.stderr


def test_print_once_lets_every_replica_call_print():
    text, line = with_line("loss.backward()", "print(loss)")
    assert found(text) == [(line, "every-replica-writes")]
    assert found(text.replace("train.init()", "train.init(print_once=True)")) == []


def test_a_sum_over_replicas_may_be_divided_by_the_length_of_the_data():
    text, line = with_line("loss.backward()", "mean = total / len(loader.dataset)")
    assert found(text) == [(line, "local-averages")]
    assert found(text.replace("total / len", "run.sum(total) / len")) == []
