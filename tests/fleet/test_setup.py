"""A daemon with the role, the TLS, the bucket's policy and the secrets of docs/fleet-setup.md, and no more."""

from __future__ import annotations

import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import daemon_fleet
import postgresql
import psycopg
import pytest
import s3
from daemon_fleet import checkout, done, eventually
from gitrepos import Upstream

from mirrord.errors import StoreUnavailableError
from mirrord.fleet.objects import ObjectStore

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs/fleet-setup.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


@contextmanager
def secured(server: postgresql.Server, place: Path) -> Iterator[Path]:
    """The documented role and rules, with TLS; answers the certificate. Undone at the end."""
    key, certificate = server.home / "tls.key", server.home / "tls.crt"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=db"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate)
    subprocess.run([*words.split(), *names], check=True, capture_output=True)
    subprocess.run(["chown", "postgres", key, certificate], check=True)
    (in_server, in_database), (rules,) = blocks("sql"), blocks("text")
    server.execute(*filter(str.strip, in_server.split(";")))
    url = f"postgresql://postgres@127.0.0.1:{server.port}/mirrord"
    for statement in filter(str.strip, in_database.split(";")):
        server.execute_in(url, statement)
    hba = server.home / "data/pg_hba.conf"
    before = hba.read_text()
    settings = {"ssl": "on", "ssl_cert_file": str(certificate), "ssl_key_file": str(key)}
    try:
        hba.write_text(rules.replace("10.0.0.0/8", "127.0.0.1/32") + before)
        server.execute(*(f"ALTER SYSTEM SET {name} = '{settings[name]}'" for name in settings))
        server.execute("SELECT pg_reload_conf()")
        yield certificate
    finally:
        hba.write_text(before)
        server.execute(*(f"ALTER SYSTEM RESET {name}" for name in settings))
        server.execute("SELECT pg_reload_conf()")


def user_with(policy: str, bucket: s3.Server) -> dict[str, str]:
    """An IAM user with this policy alone; from now on the server asks for signatures and rights."""

    def ask(action: str, **fields: str) -> str:
        scope = "Credential=any/20260101/us-east-1/iam/aws4_request"
        request = urllib.request.Request(
            f"http://127.0.0.1:{bucket.port}/",
            urllib.parse.urlencode({"Action": action, "UserName": "mirrord", **fields}).encode(),
            {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=any"},
        )
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())

    ask("CreateUser")
    ask("PutUserPolicy", PolicyName="fleet", PolicyDocument=policy)
    made = ask("CreateAccessKey")
    at = f"http://127.0.0.1:{bucket.port}/moto-api/reset-auth"
    urllib.request.urlopen(urllib.request.Request(at, b"0", {"Content-Type": "text/plain"})).close()
    words = {"AWS_ACCESS_KEY_ID": "AccessKeyId", "AWS_SECRET_ACCESS_KEY": "SecretAccessKey"}
    secrets = {name: made.partition(f"<{tag}>")[2].partition("<")[0] for name, tag in words.items()}
    return bucket.environment | secrets


def is_refused(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return "rejects connection" in str(error)
    return False


def test_a_daemon_needs_no_more_than_the_page_says(
    server: postgresql.Server,
    tmp_path: Path,
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It syncs, pins and serves; a second node takes the mirror from the store. The rest is refused."""
    (policy,) = blocks("json")
    with s3.running() as bucket, secured(server, tmp_path) as certificate:
        store = bucket.create()
        place = store.removeprefix("s3://")
        name = place.partition("/")[0]
        policy = policy.replace("bucket/prefix", place).replace(':bucket"', f':{name}"')
        # moto asks for the right to delete several objects of the bucket, S3 of each of them
        policy = policy.replace('["s3:ListBucket"]', '["s3:ListBucket", "s3:DeleteObject"]')
        environment = user_with(policy, bucket) | {"CREDENTIALS_DIRECTORY": str(tmp_path)}
        (tmp_path / "mirrord.catalog").write_text("secret\n")
        role = f"mirrord@127.0.0.1:{server.port}"
        eventually(lambda: is_refused(f"postgresql://{role}/mirrord?sslmode=disable"))
        tls = f"sslmode=verify-full&sslrootcert={certificate}"
        with daemon_fleet.fleet(server, store, upstream.path.parent) as fleet:
            fleet.catalog = f"postgresql+psycopg://{role}/mirrord?{tls}"
            first = fleet.make('[[mirror]]\nrepo = "owner/name"\n', environment=environment)
            done(first, "POST", "/v1/mirrors/owner__name/sync")
            commit = upstream.git("rev-parse", "HEAD")
            pin = {"mirror": "owner/name", "commit": commit, "reason": "paper"}
            assert first.request("POST", "/v1/pins", pin)[0] == 201
            assert checkout(first, mirror="owner/name", commit=commit)
            upstream.path.rename(tmp_path / "gone")
            second = fleet.make(environment=environment)
            assert checkout(second, mirror="owner/name", commit=commit)
            assert first.get("/v1/health")[0] == second.get("/v1/health")[0] == 200
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ObjectStore(store).probe_write()
        with pytest.raises(StoreUnavailableError):
            ObjectStore(store.replace("prefix", "other")).probe_write()
