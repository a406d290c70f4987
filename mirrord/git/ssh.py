"""What ssh says when it cannot log in, as an error of its own for each cause.

ssh runs with -v, which names the key of the host: without it, OpenSSH (9.2) shows no fingerprint
of a key that it does not know.
"""

import re

from .. import errors
from ..model import shown
from .configuration import Remote

# lines that -v adds
TRACE = re.compile(
    r"debug1: |OpenSSH_\d|Authenticated to |Authenticating to |Transferred: |Bytes per second: "
)
_HOST_KEY = re.compile(r"debug1: Server host key: (\S+ SHA256:[A-Za-z0-9+/]{20,60})")
_MISSING = re.compile(r"(?m)^(?:error: cannot run ssh|.*\bssh: (?:command )?not found)")


def find_host_key(line: str) -> str | None:
    """Return type and fingerprint of the host's key."""
    match = _HOST_KEY.match(line)
    return match[1] if match else None


def explain(
    doing: str, stderr: str, remote: Remote, host_key: str | None
) -> errors.MirrordError | None:
    """Return the error for a login that failed; None where ssh is not the cause."""
    if not remote.is_ssh:
        return None
    file = remote.known_hosts or "the daemon's user's ~/.ssh/known_hosts"
    key = f"the host's key is {host_key}" if host_key else "the host's key is not told"
    fields = {"host_key": host_key, "known_hosts": str(file)}
    if _MISSING.search(stderr):
        return errors.SshMissingError(
            f"cannot {doing}: ssh is not installed",
            hint="install openssh-client, or use an https URL",
        )
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return errors.HostKeyChangedError(
            f"cannot {doing}: the host has another key than {file} says; {key}",
            hint="ask the host's administrator whether its key was changed; if so, replace its"
            f" line in {file}",
            **fields,
        )
    if "Host key verification failed" in stderr:
        return errors.HostKeyUnknownError(
            f"cannot {doing}: the host is not in {file}, or its line there is wrong; {key}",
            hint=f"compare the fingerprint with the published one, then add the host's line of"
            f" `ssh-keyscan` to {file}",
            **fields,
        )
    if re.search(r"Permission denied \(|Too many authentication failures|Load key ", stderr):
        used = remote.ssh_key or "the keys of the daemon's user"
        lines = [line for line in stderr.splitlines() if "Load key " in line or "bad perm" in line]
        fact = f" ({shown(lines[0], 200)})" if lines else ""
        return errors.SshKeyRefusedError(
            f"cannot {doing}: the host refused {used}{fact}",
            hint="add its public key there as a deploy key that may read, or name another"
            " ssh_key; a private key is readable by its owner only",
        )
    return None
