"""Whom to notify, and of what: the table ``notify`` of a configuration file. Reads the files that hold secrets."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pollux.errors import InputFileError

Topic = Literal["ends", "failures", "alerts"]
TOPICS: tuple[Topic, ...] = ("ends", "failures", "alerts")
Security = Literal["starttls", "tls", "none"]
OWNER = "{owner}"  # in an address: the user whose job it is
_ADDRESS = re.compile(r"[^@\s<>,;:\"]{1,64}@[A-Za-z0-9.-]{1,253}")
_TOP = ("topics", "webhook", "mail")
_WEBHOOK = ("url", "secret-file", "timeout-s")
_MAIL = ("host", "port", "from", "to", "user", "password-file", "security", "timeout-s")
_PORTS: dict[Security, int] = {"starttls": 587, "tls": 465, "none": 25}


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    url: str
    secret: str = field(repr=False)
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MailConfig:
    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    security: Security = "starttls"
    timeout_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyConfig:
    """``ends``: of all jobs; ``failures``: of jobs that fail; ``alerts``: the cluster cannot work, and works again."""

    topics: tuple[Topic, ...] = ("failures", "alerts")
    webhook: WebhookConfig | None = None
    mail: MailConfig | None = None


def read_notify(path: Path, table: object) -> NotifyConfig | None:
    """Of the table ``notify`` of the file ``path``; None if there is none.

    Raises:
        InputFileError: a key is not known, or a value is of no use.
    """
    if table is None:
        return None
    found = Table(path, "notify", table, _TOP)
    topics = found.texts("topics", ["failures", "alerts"])
    for topic in topics:
        if topic not in TOPICS:
            raise InputFileError(path, f"notify.topics holds {topic!r}; of {', '.join(TOPICS)} one or more are needed")
    webhook, mail = found.values.get("webhook"), found.values.get("mail")
    if webhook is None and mail is None:
        raise InputFileError(path, "notify says neither how: add a table [notify.webhook] or [notify.mail]")
    return NotifyConfig(
        topics=tuple(topic for topic in TOPICS if topic in topics),
        webhook=None if webhook is None else _webhook(Table(path, "notify.webhook", webhook, _WEBHOOK)),
        mail=None if mail is None else _mail(Table(path, "notify.mail", mail, _MAIL)),
    )


def _webhook(table: Table) -> WebhookConfig:
    url = table.text("url")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or " " in url:
        raise table.error("url", url, "a URL is needed, as in https://hooks.example.org/pollux")
    if parts.username is not None or parts.password is not None:
        raise InputFileError(table.path, f"{table.name}.url has a password in it; leave it out: calls are signed")
    return WebhookConfig(url=url, secret=table.secret("secret-file"), timeout_s=table.seconds("timeout-s", 10.0))


def _mail(table: Table) -> MailConfig:
    security = table.text("security", "starttls")
    if security not in _PORTS:
        raise table.error("security", security, f"one of {', '.join(_PORTS)} is needed")
    to = table.texts("to")
    sender = table.text("from")
    for key, address in (("from", sender), *(("to", one) for one in to)):
        if not _ADDRESS.fullmatch(address.replace(OWNER, "owner")) or (key == "from" and OWNER in address):
            raise table.error(
                key, address, f"an address is needed, as in ops@lab.example, or {OWNER}@lab.example in to"
            )
    if not to:
        raise table.error("to", to, "one address or more are needed")
    user = table.text("user", "")
    if user and security == "none":
        raise InputFileError(table.path, f"{table.name}.user would send a password unencrypted: use starttls or tls")
    port = table.values.get("port", _PORTS[security])
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise table.error("port", port, "a number from 1 to 65535 is needed")
    return MailConfig(
        host=table.text("host"),
        port=port,
        sender=sender,
        to=tuple(to),
        user=user,
        password=table.secret("password-file") if user else "",
        security=security,
        timeout_s=table.seconds("timeout-s", 20.0),
    )


class Table:
    """One of a configuration file, whose keys are known. Also read by :mod:`pollux.server.oidc.config`."""

    def __init__(self, path: Path, name: str, values: object, known: tuple[str, ...]) -> None:
        if not isinstance(values, Mapping):
            raise InputFileError(path, f"{name} = {values!r:.80}; a table is needed: [{name}]")
        self.path, self.name, self.values = path, name, {key.replace("_", "-"): one for key, one in values.items()}
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise InputFileError(path, f"unknown key {name}.{key}.{hint} Known: {', '.join(sorted(known))}.")

    def error(self, key: str, value: object, needed: str) -> InputFileError:
        return InputFileError(self.path, f"{self.name}.{key} = {value!r:.80}; {needed}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.error(key, value, "text is needed")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value: Any = self.values.get(key, default)
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(key, value, "a list of texts is needed")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 300:
            raise self.error(key, value, "seconds are needed, at most 300")
        return float(value)

    def secret(self, key: str) -> str:
        """The content of the file that is named: a configuration is often shown around."""
        file = self.path.parent / self.text(key)
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(key, str(file), f"it cannot be read: {error}") from error
        if mode & 0o077:
            raise self.error(key, str(file), f"others can read it (mode {mode:o}): chmod 600 {file}")
        if not text:
            raise self.error(key, str(file), "it is empty; a secret is needed")
        return text
