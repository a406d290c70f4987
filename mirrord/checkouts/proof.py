"""What a reset proved: the facts that were seen, held against what was asked for.

Owns the comparison and its words. Never looks at a disk: whoever did the work says what it saw.
"""

from __future__ import annotations

from ..errors import ProofFailedError
from ..protocol import Proof

_HINT = "the checkout was destroyed; ask for another"


def require(proof: Proof, *, head: str, tree: str) -> Proof:
    """The proof, where it is one for `head` and `tree`; raises ProofFailedError with both hashes."""
    for what, wanted, seen in (("HEAD", head, proof.head), ("tree", tree, proof.tree)):
        if wanted != seen:
            raise ProofFailedError(
                f"cannot prove the checkout clean: {what} is {seen}, not {wanted}",
                hint=_HINT,
                wanted=wanted,
                seen=seen,
            )
    return proof


def unsettled(rounds: int, paths: list[bytes]) -> ProofFailedError:
    """The error for a tree that is dirty again as soon as it was cleaned."""
    names = [path.decode(errors="backslashreplace") for path in paths[:10]]
    return ProofFailedError(
        f"cannot prove the checkout clean: something still writes to it after {rounds} rounds",
        hint="end the processes that run in the checkout before the reset; it was destroyed, ask for another",
        paths=names,
    )
