"""``pollux user``: users, their roles and their tokens. For admins; members manage their own tokens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pollux.api.access import ROLES, Role, TokenSummary, UserChange, UserSummary, format_slots, parse_slots
from pollux.api.request import parse_duration
from pollux.cli.connect import DataOption, JsonOption, ServerOption, connect, moment, print_json, say, show
from pollux.cli.job_table import plain
from pollux.errors import InputFileError, InvalidValueError, UnknownNameError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Users, their roles and their tokens.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user.")]
TeamOption = Annotated[
    str | None, typer.Option("--team", metavar="TEAM", help="The user's team; may be left out if there is but one.")
]
RoleOption = Annotated[
    str | None,
    typer.Option("--role", metavar="|".join(ROLES), help="viewer: look; member: own jobs; admin: everything."),
]
WeightOption = Annotated[
    float | None, typer.Option("--weight", metavar="W", help="Share among the others beside it; 1 by default.")
]
GuaranteeOption = Annotated[
    str | None,
    typer.Option("--guarantee", metavar="SLOTS", help="Slots that come back within seconds: 8, a100=8,v100=4 or none."),
]
LimitOption = Annotated[
    str | None, typer.Option("--limit", metavar="SLOTS", help="Never more slots than this: 16, a100=8 or none.")
]
UnixOption = Annotated[
    str | None,
    typer.Option("--unix-user", metavar="USER", help="Jobs run as this Unix user, where the server is root."),
]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="How long the token is good: 12h, 30d, or never.")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="Write the token to a new file that only you can read; do not print it."
    ),
]
LabelOption = Annotated[str, typer.Option("--label", metavar="TEXT", help="Where the token is used, for the list.")]


def role_of(text: str | None) -> Role | None:
    """Raises:
    UnknownNameError: there is no such role.
    """
    if text is None:
        return None
    for role in ROLES:
        if role == text:
            return role
    raise UnknownNameError("role", text, ROLES)


def lifetime_s(text: str) -> float | None:
    """None: for ever."""
    return None if text == "never" else parse_duration(text)


def slots_of(text: str | None) -> dict[str, int] | None:
    return None if text is None else parse_slots(text)


def _change(
    team: str | None,
    role: str | None,
    weight: float | None,
    guarantee: str | None,
    limit: str | None,
    unix_user: str | None,
) -> UserChange:
    """What the options of ``user add`` and ``user set`` ask for."""
    return UserChange(
        team=team,
        role=role_of(role),
        weight=weight,
        guarantee=slots_of(guarantee),
        limit=slots_of(limit),
        unix_user=unix_user,
    )


@app.command("add")
def add(
    name: NameArgument,
    team: TeamOption = None,
    role: RoleOption = None,
    weight: WeightOption = None,
    guarantee: GuaranteeOption = None,
    limit: LimitOption = None,
    unix_user: UnixOption = None,
    expires: ExpiresOption = "90d",
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Add a user, and print a token for it. The token is shown this once."""
    change = _change(team, role, weight, guarantee, limit, unix_user)
    expires_s = lifetime_s(expires)
    with _told_to(token_file, as_json=as_json) as tell, connect(data, server) as client:
        is_root = client.address.owner == 0
        user = client.add_user(name, change)
        token = client.make_token(name, expires_s=expires_s)
        if not as_json:
            tell(token.token)
    if as_json:
        print_json({"user": user, "token": token})
        return
    if is_root and not user.unix_user and user.role != "viewer":
        say(f"warning: the server is root, so {plain(name)}'s jobs run as root; name a Unix user: --unix-user USER")
    say(f"{plain(name)} is a {user.role} of team {plain(user.team)}; the token is good until {_until(token.summary)}")


@app.command("set")
def set_(
    name: NameArgument,
    team: TeamOption = None,
    role: RoleOption = None,
    weight: WeightOption = None,
    guarantee: GuaranteeOption = None,
    limit: LimitOption = None,
    unix_user: UnixOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Change a user: team, role, weight, guarantee, limit. What is not named stays."""
    change = _change(team, role, weight, guarantee, limit, unix_user)
    with connect(data, server) as client:
        user = client.change_user(name, change)
    if as_json:
        print_json(user)
    else:
        show(user_table([user]))


@app.command("ls")
def ls(as_json: JsonOption = False, data: DataOption = None, server: ServerOption = None) -> None:
    """List users. Members see themselves."""
    with connect(data, server) as client:
        found = client.users()
    if as_json:
        print_json({"users": found})
    elif found:
        show(user_table(found))
    else:
        say("no users; add one: pollux team add TEAM, then pollux user add NAME --team TEAM")


@app.command("token")
def token(
    name: NameArgument,
    role: RoleOption = None,
    label: LabelOption = "",
    expires: ExpiresOption = "90d",
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Make another token for a user, and print it. It is shown this once."""
    with _told_to(token_file, as_json=as_json) as tell, connect(data, server) as client:
        made = client.make_token(name, role=role_of(role), label=label, expires_s=lifetime_s(expires))
        if not as_json:
            tell(made.token)
    if as_json:
        print_json(made)
        return
    say(f"token {made.summary.id} of {plain(name)}, {made.summary.role}, good until {_until(made.summary)}")


@app.command("tokens")
def tokens(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Of this user only.")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """List tokens, without their texts: whose, since when, until when."""
    with connect(data, server) as client:
        found = client.tokens(name)
    if as_json:
        print_json({"tokens": found})
    else:
        show(token_table(found))


@app.command("revoke")
def revoke(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="All tokens of this user.")] = None,
    id_: Annotated[int | None, typer.Option("--token", metavar="ID", help="This token alone; see user tokens.")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    server: ServerOption = None,
) -> None:
    """Revoke all tokens of a user, or one. They are refused from now on; jobs run on."""
    with connect(data, server) as client:
        gone = client.revoke(user=name, id_=id_)
    if as_json:
        print_json({"tokens": gone})
    else:
        say(f"revoked: {', '.join(f'token {one.id}' for one in gone) or 'none was valid'}")


@contextlib.contextmanager
def _told_to(path: Path | None, *, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Where a token goes: to stdout, or to a new file of mode 0600, which is removed if no token was made.

    Raises:
        InputFileError: the file cannot be made; the server was not asked yet.
        InvalidValueError: JSON is printed, and has the token.
    """
    if path is None:
        yield typer.echo
        return
    if as_json:
        raise InvalidValueError("--json prints the token; leave out --token-file, or --json")
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InputFileError(path, "is there already; name a new file, or remove it first") from None
    except OSError as error:
        raise InputFileError(path, f"cannot be written: {error.strerror}") from error
    with os.fdopen(file, "w") as stream:
        try:
            yield lambda token: print(token, file=stream)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def user_table(users: Iterable[UserSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("user", "team", "role", "weight", "guarantee", "limit", "unix user", "tokens"):
        table.add_column(title)
    for user in users:
        table.add_row(
            Text(plain(user.name)),
            Text(plain(user.team)),
            user.role,
            f"{user.weight:g}",
            Text(plain(format_slots(user.guarantee))),
            Text(plain(format_slots(user.limit))),
            Text(plain(user.unix_user or "-")),
            str(user.num_tokens),
        )
    return table


def token_table(found: Iterable[TokenSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("token", "user", "role", "label", "made", "good until"):
        table.add_column(title)
    for one in found:
        table.add_row(
            str(one.id),
            Text(plain(one.user or "(link)")),
            one.role,
            Text(plain(one.label or "-")),
            moment(one.created_at),
            f"revoked {moment(one.revoked_at)}" if one.revoked_at is not None else _until(one),
        )
    return table


def _until(token: TokenSummary) -> str:
    return "it is revoked" if token.expires_at is None else moment(token.expires_at)
