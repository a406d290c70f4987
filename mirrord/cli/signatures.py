"""SSH signatures of receipts, made and checked by ssh-keygen, in the user's own process.

The daemon never signs: a key and its agent are the user's. `-n` is the namespace of SSHSIG, which
keeps a signature of a receipt from passing for one of anything else.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..errors import ResourceError, UsageError

NAMESPACE = "mirrord-receipt"


def sign(data: bytes, key: Path) -> str:
    """The armoured signature by a private key, or by the agent for a public one.

    ssh-keygen asks for a passphrase on the terminal, and for a touch on stderr.
    """
    if not key.is_file():
        raise UsageError(f"cannot sign with {key}: no such file", hint="name an SSH key file")
    done = _run("sign", "-f", str(key), "-q", input=data, stdout=subprocess.PIPE)
    if done.returncode:
        raise UsageError(
            f"cannot sign with {key}: ssh-keygen ended with status {done.returncode}",
            hint="it says why on stderr; the file must be an SSH key that you may read",
        )
    return done.stdout.decode("ascii")


def check(data: bytes, signature: str, signers: Path | None, identity: str) -> tuple[bool, str]:
    """Whether a signature of `data` is good, and what ssh-keygen says of it.

    With `signers`, a file as ssh-keygen reads it (ALLOWED SIGNERS), it must be by `identity`;
    without, it says that nothing was changed since some key signed it.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(signature)
        file.flush()
        options = ["check-novalidate", "-s", file.name]
        if signers:
            options = ["verify", "-s", file.name, "-f", str(signers), "-I", identity]
        done = _run(*options, input=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.decode(errors="replace").splitlines()
    facts = [line.rstrip(".") for line in lines if not line.startswith("Could not verify")]
    return done.returncode == 0, facts[0] if facts else "it is not by this signer"


def _run(*options: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", "-Y", *options, "-n", NAMESPACE], check=False, **how)
    except FileNotFoundError as error:
        hint = "install openssh-client"
        raise ResourceError("cannot run ssh-keygen: no such command", hint=hint) from error
