"""TLS with certificate files (`cluster.tls`): contexts for servers and clients, and the message for
a refused certificate.
"""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rlcore.config.path_keys import path_error
from rlcore.config.sections.base import CERTIFICATE
from rlcore.config.sections.training import TLSConfig
from rlcore.errors import ConfigError

KEY = "cluster.tls"
READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_files(tls: TLSConfig) -> None:
    """Raise ConfigError for a missing or unsuitable file, or a key that others may read."""
    client_context(tls.ca_file, where=f"{KEY}.ca_file")
    if tls.certificate_file is not None:
        server_context(tls)


def server_context(tls: TLSConfig) -> ssl.SSLContext:
    """Make the context of a server.

    Raises ConfigError as `check_files` does, without a certificate, and for a key with a
    passphrase, since nobody is there to enter it.
    """
    certificate = tls.certificate_file
    key = tls.key_file
    if certificate is None or key is None:
        raise ConfigError(
            f"{KEY}.certificate_file: not given, and this command starts a server: give it and"
            f" {KEY}.key_file"
        )
    _check_file(certificate, f"{KEY}.certificate_file")
    _check_file(key, f"{KEY}.key_file")
    mode = stat.S_IMODE(Path(key).stat().st_mode)
    if mode & READABLE_BY_OTHERS:
        raise ConfigError(
            f"{KEY}.key_file: others may read {key} (mode {mode:04o}), expected 0600: chmod 600"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{KEY}: {certificate} and {key} are no certificate and its private key, both PEM and"
            f" without a passphrase: {error}"
        ) from error
    return context


def client_context(ca_file: str | None, *, where: str) -> ssl.SSLContext:
    """Make the context of a client that trusts the authorities of `ca_file` alone.

    Without a file the client trusts the system's authorities.

    Args:
        where: the key that names the file.

    Raises:
        ConfigError: the file is missing, or has no certificate.
    """
    if ca_file is not None:
        _check_file(ca_file, where)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"{where}: {ca_file} has no certificate in PEM: {error}") from error


def engine_client(tls: TLSConfig | None, url: str) -> ssl.SSLContext | Literal[True]:
    """Make aiohttp's `ssl` argument for a client of engines: True where no context is needed.

    aiohttp's own context would have the system's authorities as of its import.
    """
    if not url.startswith("https:"):
        return True
    return client_context(None if tls is None else tls.ca_file, where=f"{KEY}.ca_file")


def refused_engine(error: BaseException, url: str, tls: TLSConfig | None) -> str | None:
    """Return the message of `refused_certificate` for a client of engines."""
    ca_file = None if tls is None else tls.ca_file
    return refused_certificate(error, url, ca_file, where=f"{KEY}.ca_file")


def refused_certificate(
    error: BaseException, url: str, ca_file: str | None, *, where: str
) -> str | None:
    """Explain why the certificate of a server was refused; None for another error.

    Args:
        error: a connection error, as aiohttp raises it.
        where: the key of `ca_file`.
    """
    while error.__cause__ is not None and not hasattr(error, "certificate_error"):
        error = error.__cause__
    # aiohttp's error has the same class, but lacks the message.
    error = getattr(error, "certificate_error", error)
    if not isinstance(error, ssl.SSLCertVerificationError):
        return None
    authorities = f"{ca_file} ({where})" if ca_file else f"the system's authorities ({where})"
    return (
        f"the certificate of {urlsplit(url).hostname} is not accepted by {authorities}:"
        f" {error.verify_message}; is it from that authority, still valid, and made for this host's"
        " name or address (subjectAltName)?"
    )


def _check_file(path: str, where: str) -> None:
    if error := path_error(path, CERTIFICATE):
        raise ConfigError(f"{where}: {error}")
