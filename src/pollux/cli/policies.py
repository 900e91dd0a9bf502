"""``pollux policies``: lists the policies, and what each needs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from pollux.cli.outputs import output_console
from pollux.errors import PolluxError
from pollux.policy import make_policy, policy_names
from pollux.reports.glossary import policy_summary


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the policies, ours and installed ones: what each does, and whether it runs on a live cluster."""
    rows = [_row(name) for name in policy_names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("policy", "batch", "live", "what it does", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        batch = "adapts" if row["adapts_batch"] else "as asked"
        table.add_row(row["name"], batch, "yes" if row["is_live"] else "no", row["summary"])
    output_console().print(table)
    typer.echo(
        "\nbatch: jobs re-choose their batch size, or train with the one that was asked for. live: runs on a cluster; "
        "the others need what only\na simulator knows, or let jobs share slots. docs/policies.md has their sources, "
        "simplifications and results."
    )


def _row(name: str) -> dict[str, Any]:
    try:
        policy = make_policy(name)
    except PolluxError as error:  # an installed one that is broken; the others are still there
        return {"name": name, "summary": f"error: {error}", "adapts_batch": None, "is_live": False}
    return {
        "name": name,
        "summary": policy_summary(policy),
        "adapts_batch": policy.adapts_batch,
        "needs_oracle": policy.needs_oracle,
        "shares_slots": policy.shares_slots,
        "is_live": not (policy.needs_oracle or policy.shares_slots),
    }
