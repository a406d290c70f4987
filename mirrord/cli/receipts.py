"""`mirrord receipt`: a checkout's receipt, signed or not; and the verification of one."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from ..errors import IntegrityError, UsageError
from ..protocol import MalformedError, Mismatch, Receipt, ReceiptReport, canonical
from .checkouts import ID_HELP, find_id
from .session import Argument, Option, Session, print_line, read_file

_SIGN_HELP = "Sign it with this SSH key; of a public one an agent has the private one."


def receipt(
    session: Session,
    checkout_id: Annotated[str | None, Argument(ID_HELP, "[ID]")] = None,
    sign: Annotated[Path | None, Option(_SIGN_HELP, "KEYFILE")] = None,
    verify: Annotated[
        str | None, Option("Verify this receipt; - is standard input.", "FILE")
    ] = None,
    allowed_signers: Annotated[
        Path | None, Option("Who may sign, as ssh-keygen reads it.", "FILE")
    ] = None,
    identity: Annotated[
        str | None, Option("Who of the allowed signers it must be.", "NAME")
    ] = None,
) -> None:
    """The receipt is canonical JSON; docs/receipts.md defines its members.

    --verify checks the form, the signature, and commit, tree and closure against the daemon's
    mirror. Status 8 where something does not hold; each such member is named.
    """
    if (checkout_id is None) == (verify is None) or (sign and verify):
        hint = "write mirrord receipt ID [--sign KEYFILE], or mirrord receipt --verify FILE"
        raise UsageError("cannot tell whether to issue or to verify a receipt", hint=hint)
    if (allowed_signers is None) != (identity is None) or (identity and not verify):
        hint = "they go together, with --verify"
        raise UsageError("cannot take --allowed-signers or --identity alone", hint=hint)
    if verify is not None:
        _verify(session, verify, allowed_signers, identity or "")
        return
    found = session.client.get_receipt(find_id(session, str(checkout_id)))
    if sign:
        found = replace(found, signature=_signatures().sign(found.signed_bytes(), sign))
    print_line(found.canonical().decode())


def _verify(session: Session, file: str, signers: Path | None, identity: str) -> None:
    if signers and not signers.is_file():
        raise UsageError(f"cannot read {signers}: no such file", hint="name a file of signers")
    notes: list[str] = []
    try:
        given = _read(read_file(file))
    except MalformedError as error:
        report = ReceiptReport(holds=False, mismatches=[_fault("format", str(error))])
    else:
        is_good, detail = _judge_signature(given, signers, identity)
        report = session.client.verify_receipt(given)
        faults = [] if is_good else [_fault("signature", detail)]
        notes = [detail] if is_good else []
        report = replace(
            report,
            holds=report.holds and is_good,
            mismatches=[*faults, *report.mismatches],
            checked=["format", *(["signature"] if given.signature else []), *report.checked],
        )
    session.answer(report, [*_lines(report), *notes])
    if not report.holds:
        raise SystemExit(IntegrityError.exit_status)


def _read(content: bytes) -> Receipt:
    """The receipt in a file, however that is laid out; MalformedError for anything else.

    Members that the format does not have are refused: nobody would verify them.
    """
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        given = Receipt.from_json(value)
        is_whole = canonical(given) == canonical(value)
    except MalformedError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(f"it is no JSON that a receipt can be: {error}") from error
    if not is_whole:
        raise MalformedError("it has members or spellings that the format does not have")
    return given


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise MalformedError("a member occurs twice")
    return value


def _judge_signature(given: Receipt, signers: Path | None, identity: str) -> tuple[bool, str]:
    """Whether the signature is as good as was asked for, and what to say of it."""
    if given.signature is None:
        return signers is None, "it is not signed"
    is_good, detail = _signatures().check(given.signed_bytes(), given.signature, signers, identity)
    if is_good and not signers:
        detail += "; whose key that is was not checked: give --allowed-signers and --identity"
    return is_good, detail


def _signatures() -> Any:
    """Loaded for a signature alone: with what starts processes it takes 20 ms."""
    return importlib.import_module(".signatures", __package__)


def _fault(member: str, fact: str) -> Mismatch:
    return Mismatch(member=member, stated=None, found=fact)


def _lines(report: ReceiptReport) -> Iterator[str]:
    for each in report.mismatches:
        stated = "" if each.stated is None else f"stated {each.stated}, found "
        yield f"{each.member}: {stated}{each.found or 'nothing'}"
    checked = f": checked {', '.join(report.checked)}" if report.checked else ""
    yield f"{'the receipt holds' if report.holds else 'the receipt does not hold'}{checked}"
