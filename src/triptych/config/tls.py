"""The two files that HTTPS needs, tried out before anything loads.

`check_tls` loads them as the server will later, and tells by the name of its flag which one is wrong.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from triptych.config.settings import ServeSettings
from triptych.errors import ConfigError

__all__ = ["check_tls"]


def check_tls(settings: ServeSettings) -> None:
    """Raises `ConfigError` for files that cannot be read, do not belong together, or need a password."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            wanted = f"{settings.named('ssl_certfile')} as well"
            raise ConfigError("a key without its certificate", where=settings.named("ssl_keyfile"), wanted=wanted)
        return
    for field in ("ssl_certfile", "ssl_keyfile"):
        if (path := getattr(settings, field)) is not None:
            _check_readable(path, where=settings.named(field))
    pair = "ssl_certfile" if settings.ssl_keyfile is None else "ssl_keyfile"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"certificate and private key cannot be used: {reason}",
            where=settings.named(pair),
            found=getattr(settings, pair),
            wanted="PEM files of a certificate and its private key, without a password",
        ) from error


def _check_readable(path: str, *, where: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where, found=path) from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted")
