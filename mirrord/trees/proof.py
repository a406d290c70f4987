"""What a proof has to say."""

from ..errors import ProofFailedError
from ..protocol import Proof


def must_prove(proof: Proof, *, head: str, tree: str) -> Proof:
    """Return the proof; raise ProofFailedError with both hashes unless it is for `head`, `tree`."""
    for name, wanted, seen in (("HEAD", head, proof.head), ("tree", tree, proof.tree)):
        if wanted != seen:
            raise ProofFailedError(
                f"cannot prove the checkout clean: {name} is {seen}, not {wanted}",
                hint="the checkout was removed; make another",
                wanted=wanted,
                seen=seen,
            )
    return proof
