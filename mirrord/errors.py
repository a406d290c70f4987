"""All errors that mirrord reports, as one tree.

    MirrordError
    ├── UsageError        the request or the configuration is wrong     exit 2
    ├── AccessError       the peer has no permission                    exit 3
    ├── NotFoundError     the named thing does not exist                exit 4
    ├── ConflictError     the current state forbids it                  exit 5
    ├── UpstreamError     another host failed                           exit 6
    ├── ResourceError     disk, kernel feature, limit, deadline         exit 7
    ├── IntegrityError    something recorded cannot be served           exit 8
    ├── NoDaemonError     no daemon at the socket                       exit 9
    └── InternalError     a bug                                         exit 1

A family says what the caller can do; each class has a stable `code`. The daemon writes an error as
an RFC 9457 problem, and the client reads it as the same class. Messages have the form `cannot
<verb> <noun> <name>: <fact>`; the hint is the remedy.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

_CLASSES: "dict[str, type[MirrordError]]" = {}


class MirrordError(Exception):
    """The base of all errors that mirrord raises on purpose.

    `message` is one sentence, `hint` the remedy. `facts` are JSON values, members of the problem.
    """

    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __init_subclass__(
        cls, *, title: str = "", status: int = 0, exits: int = 0, code: str = ""
    ) -> None:
        """Register a class with a title, under `code`; by default InvalidNameError: `invalid-name`.

        `status` is HTTP's, `exits` the command line's, both by default the family's.
        """
        if title:
            name = re.sub("(?<=.)(?=[A-Z])", "-", cls.__name__.removesuffix("Error"))
            cls.title, cls.code = title, code or name.lower()
            cls.http_status, cls.exit_status = status or cls.http_status, exits or cls.exit_status
            _CLASSES[cls.code] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep hint and facts when pickled, which exceptions do not by default."""
        return partial(type(self), self.message, hint=self.hint, **self.facts), ()

    def problem(self) -> dict[str, Any]:
        """Return this error as an RFC 9457 problem."""
        members = {
            "type": f"urn:mirrord:error:{self.code}",
            "title": self.title,
            "status": self.http_status,
            "code": self.code,
            "detail": self.message,
            "hint": self.hint,
        }
        return {**self.facts, **members}


def iter_errors(family: type[MirrordError]) -> Iterator[type[MirrordError]]:
    """Iterate over the registered classes of a family, the family first."""
    return (each for each in _CLASSES.values() if issubclass(each, family))


_PROBLEM_MEMBERS = {"type", "title", "status", "code", "detail", "hint", "instance", "message"}


def from_problem(problem: Mapping[str, Any]) -> MirrordError:
    """Read the error of an RFC 9457 problem; an unknown code as the family of its HTTP status."""
    status = problem.get("status", 500)
    cls = _CLASSES.get(str(problem.get("code")))
    if cls is None:
        families = (c for c in _CLASSES.values() if c.http_status == status)
        cls = next(families, InternalError)
    facts = {key: value for key, value in problem.items() if key not in _PROBLEM_MEMBERS}
    message = str(problem.get("detail") or problem.get("title") or "unknown error")
    return cls(message, hint=problem.get("hint"), **facts)


class UsageError(MirrordError, title="Wrong usage", status=400, exits=2): ...


class InvalidConfigError(UsageError, title="Invalid configuration"): ...


class InvalidRequestError(UsageError, title="Invalid request"): ...


class BodyTooLargeError(UsageError, title="Request body too large", status=413): ...


class TtlTooLongError(UsageError, title="Time to live too long"): ...


class InvalidNameError(UsageError, title="Invalid name"): ...


class InvalidUrlError(UsageError, title="Invalid upstream URL"): ...


class InvalidCommitError(UsageError, title="Invalid commit"): ...


class InvalidDatasetError(UsageError, title="Invalid dataset"): ...


class InvalidMappingError(UsageError, title="Invalid mapping"): ...


class InvalidRecipeError(UsageError, title="Invalid recipe"): ...


class InvalidBundleError(UsageError, title="Invalid bundle"): ...


class InvalidPatchError(UsageError, title="Invalid patch"): ...


class PathOutsideCheckoutError(UsageError, title="Path outside the checkout"): ...


class AccessError(MirrordError, title="Not allowed", status=403, exits=3, code="not-allowed"): ...


class OwnerDeniedError(AccessError, title="The checkout's owner may not"): ...


class NotFoundError(MirrordError, title="Not found", status=404, exits=4): ...


class MirrorNotFoundError(NotFoundError, title="No such mirror"): ...


class DatasetNotFoundError(NotFoundError, title="No such dataset"): ...


class InstanceNotFoundError(NotFoundError, title="No such instance"): ...


class RecipeNotFoundError(NotFoundError, title="No recipe for the instance"): ...


class CommitNotFoundError(NotFoundError, title="No such commit"): ...


class CheckoutNotFoundError(NotFoundError, title="No such checkout"): ...


class SnapshotNotFoundError(NotFoundError, title="No such snapshot"): ...


class EnvironmentNotFoundError(NotFoundError, title="No such environment"): ...


class LayerNotFoundError(NotFoundError, title="No such layer"): ...


class OperationNotFoundError(NotFoundError, title="No such operation"): ...


class AuditNotFoundError(NotFoundError, title="No such audit"): ...


class PinNotFoundError(NotFoundError, title="No such pin"): ...


class PathNotFoundError(NotFoundError, title="No such path"): ...


class ConflictError(MirrordError, title="Conflict", status=409, exits=5): ...


class AlreadyRunningError(ConflictError, title="A daemon already holds the state directory"): ...


class MirrorExistsError(ConflictError, title="The mirror exists"): ...


class InstanceAmbiguousError(
    ConflictError, title="Several datasets record the instance differently"
): ...


class MirrorInUseError(ConflictError, title="The mirror is in use"): ...


class CheckoutBusyError(ConflictError, title="The checkout is busy"): ...


class SnapshotExistsError(ConflictError, title="The snapshot exists"): ...


class LayerExistsError(ConflictError, title="The layer exists"): ...


class LayerInUseError(ConflictError, title="The layer is in use"): ...


class EnvironmentInUseError(ConflictError, title="The environment is in use"): ...


class TreeRefusedError(ConflictError, title="git refuses what is in the checkout"): ...


class PatchConflictError(ConflictError, title="The patch does not apply"): ...


class SteeringRefusedError(ConflictError, title="The change could steer the tests"): ...


class CatalogTooNewError(ConflictError, title="The catalog was written by a newer version"): ...


class StateTooNewError(
    ConflictError, title="The state directory was written by a newer version"
): ...


class OperationFinishedError(ConflictError, title="The operation has finished"): ...


class CancelledError(ConflictError, title="Cancelled"): ...


class ProcessGoneError(ConflictError, title="The process has ended"): ...


class ClaimLostError(ConflictError, title="Another node has claimed it"): ...


class UpstreamError(
    MirrordError, title="Upstream failed", status=502, exits=6, code="upstream-failed"
): ...


class UpstreamNotFoundError(UpstreamError, title="Upstream not found"): ...


class UpstreamAuthError(UpstreamError, title="Upstream wants credentials"): ...


class UpstreamEmptyError(UpstreamError, title="Upstream has no refs"): ...


class UpstreamLossError(UpstreamError, title="Upstream lost most of what it had"): ...


class UpstreamTimeoutError(UpstreamError, title="Upstream too slow"): ...


class UpstreamThrottledError(UpstreamError, title="Upstream throttles us"): ...


class ResourceError(MirrordError, title="A resource is missing", status=503, exits=7): ...


class DiskFullError(ResourceError, title="Disk full", status=507): ...


class DiskFailedError(ResourceError, title="The disk failed"): ...


class CatalogUnavailableError(ResourceError, title="The catalog cannot be reached"): ...


class CatalogFullError(
    CatalogUnavailableError, title="The catalog's server has no room", status=507
): ...


class CatalogConflictError(ResourceError, title="The catalog was changed at the same time"): ...


class StoreUnavailableError(ResourceError, title="The store cannot be reached"): ...


class StoreFullError(StoreUnavailableError, title="The store is full", status=507): ...


class TooManyCheckoutsError(ResourceError, title="Too many checkouts"): ...


class TooManySnapshotsError(ResourceError, title="Too many snapshots"): ...


class TooManyLayersError(ResourceError, title="Too many layers"): ...


class LimitReachedError(ResourceError, title="A limit is reached"): ...


class TooManyRequestsError(ResourceError, title="Too many requests of one user", status=429): ...


class OverloadedError(ResourceError, title="Too many requests of all users"): ...


class QuotaExceededError(ResourceError, title="Too much disk of one user", status=507): ...


class TooManyConnectionsError(ResourceError, title="Too many connections"): ...


class TooManyFilesError(ResourceError, title="Too many open files"): ...


class DiffTooLargeError(ResourceError, title="The changes are too large", status=422): ...


class ForkTooLargeError(ResourceError, title="The checkout has too much to copy", status=422): ...


class TreeTooLargeError(ResourceError, title="The commit's tree is too large", status=422): ...


class BackendUnavailableError(ResourceError, title="This host lacks the backend"): ...


class DeadlineError(
    ResourceError, title="Deadline exceeded", status=504, code="deadline-exceeded"
): ...


class WorkerCrashedError(ResourceError, title="A worker process died"): ...


class OutOfMemoryError(ResourceError, title="Too little memory for the request"): ...


class GitFailedError(ResourceError, title="git failed"): ...


class GitKilledError(ResourceError, title="git was killed"): ...


class StoppingError(ResourceError, title="The daemon is stopping"): ...


class IntegrityError(MirrordError, title="Integrity", status=424, exits=8): ...


class CommitUnservableError(IntegrityError, title="A recorded commit cannot be served"): ...


class EnvironmentFailedError(IntegrityError, title="The environment cannot be built"): ...


class ProofFailedError(IntegrityError, title="A proof failed"): ...


class CorruptObjectError(IntegrityError, title="A corrupt object"): ...


class DamagedMirrorError(CorruptObjectError, title="A mirror is damaged"): ...


class StoreDamagedError(
    IntegrityError, title="An object of the store is not what it should be"
): ...


class CorruptCatalogError(IntegrityError, title="The catalog is damaged"): ...


class NoDaemonError(MirrordError, title="No daemon", status=503, exits=9): ...


class InternalError(MirrordError, title="Internal error", status=500, exits=1): ...
