"""`mirrord receipt`: issue the receipt of a checkout, sign it, and verify receipts.

The daemon never signs: ssh-keygen does, as the user. `-n` is the namespace of SSHSIG: a signature
of anything else is not valid for a receipt.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ...errors import IntegrityError, ResourceError, UsageError
from ...presence import is_file
from ...protocol import MalformedError, Mismatch, Receipt, ReceiptReport, canonical
from ..session import Argument, Option, Session, print_line, read_file
from .checkouts import ID_HELP, find_id

_SIGN_HELP = "SSH key to sign it with; for a public key the SSH agent has the private one."


def receipt(
    session: Session,
    checkout_id: Annotated[str | None, Argument(ID_HELP, "[ID]", "checkout")] = None,
    sign: Annotated[Path | None, Option(_SIGN_HELP, "KEYFILE")] = None,
    verify: Annotated[
        str | None, Option("Receipt to verify; - is standard input.", "FILE", names="file")
    ] = None,
    allowed_signers: Annotated[
        Path | None, Option("Allowed signers, in the format of ssh-keygen.", "FILE")
    ] = None,
    identity: Annotated[
        str | None, Option("Allowed signer that it must be signed by.", "NAME")
    ] = None,
) -> None:
    """The receipt is canonical JSON; docs/seals.md defines its members.

    --verify checks format and signature, compares commit, tree and closure with the daemon's
    mirror, and looks for the receipt among those that the daemon issued. Status 8 if a member does
    not hold, each of which is listed, or if nothing proves the receipt: it is unsigned, and the
    daemon has no record of it.
    """
    if (checkout_id is None) == (verify is None) or (sign and verify):
        hint = "use `mirrord receipt ID [--sign KEYFILE]` or `mirrord receipt --verify FILE`"
        raise UsageError("cannot tell whether to issue or to verify a receipt", hint=hint)
    if (allowed_signers is None) != (identity is None) or (identity and not verify):
        hint = "give both, with --verify"
        raise UsageError("cannot use --allowed-signers or --identity alone", hint=hint)
    if verify is not None:
        _verify(session, verify, allowed_signers, identity or "")
        return
    answer = session.client.get_receipt(find_id(session, str(checkout_id)))
    if sign:
        answer = replace(answer, signature=_sign(answer.signed_bytes(), sign))
    print_line(answer.canonical().decode())


def _verify(session: Session, file: str, signers: Path | None, identity: str) -> None:
    if signers and not is_file(signers):
        raise UsageError(
            f"cannot read {signers}: no such file", hint="name a file of allowed signers"
        )
    notes: list[str] = []
    try:
        given = _parse(read_file(file))
    except MalformedError as error:
        report = ReceiptReport(holds=False, mismatches=[_mismatch("format", str(error))])
    else:
        is_good, detail = _judge_signature(given, signers, identity)
        report = session.client.verify_receipt(given)
        faults = [] if is_good else [_mismatch("signature", detail)]
        signed: list[Literal["signature"]] = ["signature"] if given.signature else []
        report = replace(
            report,
            holds=report.holds and is_good,
            mismatches=[*faults, *report.mismatches],
            checked=["format", *signed, *report.checked],
            proven_by=[*report.proven_by, *(signed if is_good else [])],
        )
        notes = [detail] if given.signature and is_good else []
        notes += [] if given.signature else [_describe_unsigned(report)]
    session.answer(report, [*_report_lines(report), *notes])
    if not (report.holds and report.proven_by):
        raise SystemExit(IntegrityError.exit_status)


def _parse(content: bytes) -> Receipt:
    """Parse a receipt, in any layout of JSON; raises MalformedError.

    Unknown members are refused, because nothing verifies them.
    """
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        given = Receipt.from_json(value)
        is_whole = canonical(given) == canonical(value)
    except MalformedError:
        raise
    # RecursionError: JSON that is nested deeper than Python's parser goes
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(f"it is not a receipt: {error}") from error
    if not is_whole:
        raise MalformedError("it has unknown members, or values in another spelling")
    return given


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise MalformedError("a member occurs twice")
    return value


def _judge_signature(given: Receipt, signers: Path | None, identity: str) -> tuple[bool, str]:
    """Return whether the signature is good enough, and what to report about it."""
    if given.signature is None:
        return signers is None, "unsigned"
    is_good, detail = _check(given.signed_bytes(), given.signature, signers, identity)
    if is_good and not signers:
        detail += "; the signer was not checked: give --allowed-signers and --identity"
    return is_good, detail


def _describe_unsigned(report: ReceiptReport) -> str:
    if report.proven_by:
        return "unsigned; the daemon has issued exactly this receipt"
    rest = "a mirror cannot tell whether history, seal, times, resets and diff are true"
    return f"unsigned, and the daemon has no record of it: {rest}"


def _mismatch(member: str, fact: str) -> Mismatch:
    return Mismatch(member=member, stated=None, found=fact)


def _report_lines(report: ReceiptReport) -> Iterator[str]:
    for mismatch in report.mismatches:
        stated = "" if mismatch.stated is None else f"stated {mismatch.stated}, found "
        yield f"{mismatch.member}: {stated}{mismatch.found or 'nothing'}"
    checked = f": checked {', '.join(report.checked)}" if report.checked else ""
    verdict = "holds" if report.proven_by else "is not proven"
    yield f"the receipt {verdict if report.holds else 'does not hold'}{checked}"


# -- signatures -----------------------------------------------------------------------------------


def _sign(data: bytes, key: Path) -> str:
    """Return the armoured signature by a private key, or by the SSH agent for a public key.

    ssh-keygen asks for a passphrase on the terminal, and for a touch on stderr.
    """
    if not is_file(key):
        raise UsageError(f"cannot sign with {key}: no such file", hint="name an SSH key file")
    done = _ssh_keygen("sign", "-f", str(key), "-q", input=data, stdout=subprocess.PIPE)
    if done.returncode:
        raise UsageError(
            f"cannot sign with {key}: ssh-keygen ended with status {done.returncode}",
            hint="see its message on stderr; the file must be a readable SSH key",
        )
    return done.stdout.decode("ascii")


def _check(data: bytes, signature: str, signers: Path | None, identity: str) -> tuple[bool, str]:
    """Return whether a signature of `data` is good, and what ssh-keygen says about it.

    With `signers`, a file of ssh-keygen(1) ALLOWED SIGNERS, it must be by `identity`. Without, it
    only proves that `data` is what some key signed.
    """
    # ssh-keygen reads the data from its input, and a signature from a file alone
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(signature)
        file.flush()
        options = ["check-novalidate", "-s", file.name]
        if signers:
            options = ["verify", "-s", file.name, "-f", str(signers), "-I", identity]
        done = _ssh_keygen(*options, input=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.decode(errors="replace").splitlines()
    messages = [line.rstrip(".") for line in lines if not line.startswith("Could not verify")]
    return done.returncode == 0, messages[0] if messages else "it is not by this signer"


_NAMESPACE = "mirrord-receipt"


def _ssh_keygen(*options: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", "-Y", *options, "-n", _NAMESPACE], check=False, **how)
    except FileNotFoundError as error:
        hint = "install openssh-client"
        raise ResourceError("cannot run ssh-keygen: no such command", hint=hint) from error
