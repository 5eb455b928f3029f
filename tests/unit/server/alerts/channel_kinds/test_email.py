"""Mail over TLS, to real mail servers with a certificate of their own."""

from __future__ import annotations

import datetime
import smtplib
import socket
import ssl
from email.message import EmailMessage

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast_server.alerts.channel_kinds.email import send_mail
from holdfast_server.core.alert_settings import AlertSettings


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a certificate for `localhost` that signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("certificate") / "mail.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


class Box:
    """Takes mail from whoever shows the password, and notes whether it came over TLS."""

    def __init__(self) -> None:
        self.logins: list[bytes] = []
        self.mails: list[tuple[str, bool]] = []

    def authenticate(self, server, session, envelope, mechanism, data):
        self.logins.append(data.password)
        good = data.password == b"letter-box"
        return AuthResult(success=good, handled=good)

    async def handle_DATA(self, server, session, envelope):  # noqa: N802 - aiosmtpd's name
        over_tls = server.transport.get_extra_info("ssl_object") is not None
        self.mails.append((envelope.content.decode(), over_tls))
        return "250 OK"


@pytest.fixture
def start(certificate):
    """Starts a mail server that speaks TLS in this way, and gives the settings to reach it by."""
    controllers = []

    def start(box: Box, served: str, wanted: str | None = None) -> AlertSettings:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        speaks = {
            "starttls": {"tls_context": context, "require_starttls": True},
            "ssl": {"ssl_context": context, "auth_require_tls": False},  # it knows of no TLS but STARTTLS
            "none": {"auth_require_tls": False},
        }[served]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        controller = Controller(box, hostname="localhost", port=port, authenticator=box.authenticate, **speaks)
        controller.start()
        controllers.append(controller)
        return AlertSettings(
            smtp_host="localhost", smtp_port=port, smtp_user="holdfast", smtp_password="letter-box",
            smtp_from="holdfast@example.org", smtp_security=wanted or served,
        )  # fmt: skip

    yield start
    for controller in controllers:
        controller.stop()


def letter() -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "holdfast@example.org", "ada@example.org", "Job silent"
    mail.set_content("Nothing was heard of it.")
    return mail


@pytest.mark.parametrize("security", ["starttls", "ssl"])
def test_mail_and_password_travel_over_tls(start, certificate, monkeypatch, security):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    box = Box()
    send_mail(letter(), start(box, security))
    ((content, over_tls),) = box.mails
    assert (over_tls, "Subject: Job silent" in content, box.logins) == (True, True, [b"letter-box"])


@pytest.mark.parametrize("security", ["starttls", "ssl"])
def test_a_server_whose_certificate_nobody_vouches_for_gets_neither(start, security):
    box = Box()
    with pytest.raises(ssl.SSLCertVerificationError):
        send_mail(letter(), start(box, security))
    assert (box.mails, box.logins) == ([], [])


def test_a_server_that_offers_no_starttls_gets_neither(start):
    box = Box()
    with pytest.raises(smtplib.SMTPNotSupportedError):
        send_mail(letter(), start(box, "none", wanted="starttls"))
    assert (box.mails, box.logins) == ([], [])
