"""Flags of the access panel: what is taken, in which form, and what is refused before anything loads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from triptych.config.settings import ServeSettings, read_settings
from triptych.config.tls import check_tls
from triptych.errors import ConfigError


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a certificate and its key, another key, the key with a password, and both in one file."""
    folder = tmp_path_factory.mktemp("tls")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {curve} -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost",
        "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:prime256v1 -out other.pem",
        "ec -in key.pem -aes128 -passout pass:secret -out locked.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    (folder / "text.pem").write_text("hello")
    return folder


@pytest.mark.parametrize(("cert", "key"), [("cert.pem", "key.pem"), ("both.pem", None), (None, None)])
def test_a_certificate_with_its_key_is_taken(tls: Path, cert: str | None, key: str | None) -> None:
    check_tls(ServeSettings(ssl_certfile=cert and str(tls / cert), ssl_keyfile=key and str(tls / key)))


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        (None, "key.pem", "^--ssl-keyfile: a key without its certificate; wanted --ssl-certfile"),
        ("missing.pem", "key.pem", "^--ssl-certfile: cannot be read: No such file"),
        ("cert.pem", "missing.pem", "^--ssl-keyfile: cannot be read: No such file"),
        ("cert.pem", ".", "^--ssl-keyfile: cannot be read: Is a directory"),
        ("cert.pem", "other.pem", "^--ssl-keyfile: certificate and private key cannot be used: .*MISMATCH"),
        ("cert.pem", "locked.pem", "^--ssl-keyfile: .*the private key is encrypted"),
        ("cert.pem", None, "^--ssl-certfile: certificate and private key cannot be used"),
        ("text.pem", "key.pem", "^--ssl-keyfile: certificate and private key cannot be used"),
    ],
)
def test_files_that_cannot_serve_https_are_refused_by_flag(
    tls: Path, cert: str | None, key: str | None, message: str
) -> None:
    settings = ServeSettings(ssl_certfile=cert and str(tls / cert), ssl_keyfile=key and str(tls / key))
    with pytest.raises(ConfigError, match=message):
        check_tls(settings)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("root_path", "/", ""),
        ("root_path", "/pictures/v2/", "/pictures/v2"),
        ("public_url", "https://x.example:8443/pictures/", "https://x.example:8443/pictures"),
        ("allowed_origins", ["HTTPS://X.example", "http://localhost:3000/", "*"], None),
        ("api_keys", ["sk-1", "!~"], ("sk-1", "!~")),
    ],
)
def test_addresses_are_kept_in_one_form(field: str, given: object, kept: object) -> None:
    settings = read_settings({field: given}, {})
    wanted = kept if kept is not None else ("https://x.example", "http://localhost:3000", "*")
    assert getattr(settings, field) == wanted


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("root_path", "pictures", "--root-path: not a path prefix"),
        ("root_path", "/a b", "--root-path: not a path prefix"),
        ("root_path", "//host", "--root-path: not a path prefix"),
        ("public_url", "x.example", "--public-url: not an address"),
        ("public_url", "ftp://x.example", "--public-url: not an address"),
        ("public_url", "https://x.example/?a=b", "--public-url: not an address"),
        ("public_url", "https://x.example:port", "--public-url: not an address"),
        ("allowed_origins", ["https://x.example/page"], "--allowed-origins: not a web origin"),
        ("allowed_origins", ["x.example"], "--allowed-origins: not a web origin"),
        ("api_keys", ["two words"], "--api-key: not a key that a header can carry"),
        ("admin_api_key", "schl\xfcssel", "--admin-api-key: not a key that a header can carry"),
    ],
)
def test_what_could_never_match_is_refused(field: str, given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        read_settings({field: given}, {})
    assert "key" not in field or "two words" not in str(caught.value)
