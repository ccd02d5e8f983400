"""Certificates for tests, made by `cryptography`."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rlcore.config.sections.training import TLSConfig

DAY = datetime.timedelta(days=1)


@dataclass
class Authority:
    """An authority of one's own, whose files are in `folder`."""

    folder: Path
    name: str = "authority"
    _key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    @property
    def file(self) -> Path:
        """The file with its certificate."""
        path = self.folder / f"{self.name}.pem"
        if not path.exists():
            constraint = x509.BasicConstraints(ca=True, path_length=0)
            usage = x509.KeyUsage(
                *(False,) * 5, key_cert_sign=True, crl_sign=True, encipher_only=False,
                decipher_only=False,
            )  # fmt: skip
            builder = self._builder(self.name, self._key.public_key(), 1)
            builder = builder.add_extension(constraint, critical=True)
            self._write(path, builder.add_extension(usage, critical=True))
        return path

    def tls(self, *names: str, days: int = 1, trusted: Path | None = None) -> TLSConfig:
        """Make a certificate for host names and addresses, and the section that uses it.

        Args:
            days: how long it is valid from now; negative: since when it is not.
            trusted: the authorities' file of clients; default: ours.
        """
        stem = "-".join([*names, str(days)])
        certificate, private = (self.folder / f"{stem}.{kind}" for kind in ("crt", "key"))
        key = ec.generate_private_key(ec.SECP256R1())
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        private.chmod(0o600)
        alternatives = x509.SubjectAlternativeName([_general(name) for name in names])
        self._write(
            certificate,
            self._builder(stem, key.public_key(), days).add_extension(alternatives, critical=False),
        )
        return TLSConfig(
            ca_file=str(trusted or self.file),
            certificate_file=str(certificate),
            key_file=str(private),
        )

    def _builder(
        self, name: str, public: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        issuer = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
            )
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
