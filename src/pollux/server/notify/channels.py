"""How a notice is delivered: to a webhook, or by SMTP. Each call is one attempt; the notifier repeats it."""

from __future__ import annotations

import hashlib
import hmac
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any, Protocol

from pollux.server.notify.config import OWNER, MailConfig, WebhookConfig
from pollux.server.notify.notice import Notice

SIGNATURE = "Pollux-Signature"
_RETRIED = (408, 425, 429)


class NotDelivered(Exception):
    """``is_final``: another attempt would fail as well."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Receiver(Protocol):
    name: str

    def deliver(self, notice: Notice) -> None:
        """Raises:
        NotDelivered: it was not taken.
        """


def signature(secret: str, at: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 over the time, a dot and the body, so that an old call cannot be repeated."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead anywhere, with what was told of jobs."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Webhook:
    name = "webhook"

    def __init__(self, config: WebhookConfig) -> None:
        self._config = config
        self._opener = urllib.request.build_opener(_NoRedirect)

    def deliver(self, notice: Notice) -> None:
        body, at = notice.to_json(), int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "pollux",
            "Pollux-Event": notice.event,
            "Pollux-Delivery": notice.id,
            SIGNATURE: signature(self._config.secret, at, body),
        }
        request = urllib.request.Request(self._config.url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._config.timeout_s):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            is_final = error.code < 500 and error.code not in _RETRIED
            raise NotDelivered(f"it answered {error.code}", is_final=is_final) from error
        except (OSError, ValueError) as error:  # no connection, a time-out, no HTTP
            raise NotDelivered(str(error) or repr(error), is_final=False) from error


class Mail:
    name = "mail"

    def __init__(self, config: MailConfig) -> None:
        self._config = config

    def deliver(self, notice: Notice) -> None:
        to = [one.replace(OWNER, notice.owner) for one in self._config.to if OWNER not in one or notice.owner]
        if not to:
            return
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self._config.sender, ", ".join(to), notice.subject
        message["Date"], message["Message-ID"] = formatdate(notice.at), f"<{notice.id}@pollux>"
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(notice.body)
        try:
            with self._connect() as server:
                if self._config.user:
                    server.login(self._config.user, self._config.password)
                refused = server.send_message(message)
        except smtplib.SMTPResponseException as error:
            raise NotDelivered(f"it answered {error.smtp_code}", is_final=500 <= error.smtp_code < 600) from error
        except smtplib.SMTPRecipientsRefused as error:
            is_final = all(code >= 500 for code, _ in error.recipients.values())
            raise NotDelivered(f"it refused {', '.join(error.recipients)}", is_final=is_final) from error
        except (OSError, smtplib.SMTPException) as error:
            raise NotDelivered(str(error) or repr(error), is_final=False) from error
        if refused:  # the others have it: an attempt more would send it to them again
            raise NotDelivered(f"it refused {', '.join(refused)}", is_final=True)

    def _connect(self) -> smtplib.SMTP:
        config = self._config
        context = ssl.create_default_context()
        if config.security == "tls":
            return smtplib.SMTP_SSL(config.host, config.port, timeout=config.timeout_s, context=context)
        server = smtplib.SMTP(config.host, config.port, timeout=config.timeout_s)
        if config.security == "starttls":
            try:
                server.starttls(context=context)
            except BaseException:
                server.close()
                raise
        return server
