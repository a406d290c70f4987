"""Every error that mirrord reports, as one tree.

    MirrordError
    ├── UsageError        the request or the configuration is wrong     exit 2
    ├── AccessError       the peer may not do this                      exit 3
    ├── NotFoundError     the named thing does not exist                exit 4
    ├── ConflictError     the state of things forbids it now            exit 5
    ├── UpstreamError     another host failed us                        exit 6
    ├── ResourceError     disk, kernel feature, limit, deadline         exit 7
    ├── IntegrityError    something recorded cannot be served           exit 8
    ├── NoDaemonError     nothing answers at the socket                 exit 9
    └── InternalError     a bug                                         exit 1

A family says what the caller can do; a leaf has a stable `code`. The daemon writes an error as an
RFC 9457 problem; the client reads it back as the same class. Messages read `cannot <verb> <noun>
<name>: <fact>`; the hint is the remedy.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

_CLASSES: "dict[str, type[MirrordError]]" = {}


class MirrordError(Exception):
    """Root of all errors that mirrord raises on purpose.

    `message` is one sentence, `hint` the remedy; `facts` are JSON values, members of the problem.
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

    def __init_subclass__(cls) -> None:
        if "code" in cls.__dict__:
            _CLASSES[cls.code] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross a process boundary whole: the default keeps neither hint nor facts."""
        return partial(type(self), self.message, hint=self.hint, **self.facts), ()

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 members of this error."""
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
    """The classes of a family with a code of their own, the family first."""
    return (each for each in _CLASSES.values() if issubclass(each, family))


_PROBLEM_MEMBERS = {"type", "title", "status", "code", "detail", "hint", "instance", "message"}


def from_problem(problem: Mapping[str, Any]) -> MirrordError:
    """The error of an RFC 9457 problem; an unknown code becomes the family of its HTTP status."""
    status = problem.get("status", 500)
    cls = _CLASSES.get(str(problem.get("code")))
    if cls is None:
        families = (c for c in _CLASSES.values() if c.http_status == status)
        cls = next(families, InternalError)
    facts = {key: value for key, value in problem.items() if key not in _PROBLEM_MEMBERS}
    message = str(problem.get("detail") or problem.get("title") or "unknown error")
    return cls(message, hint=problem.get("hint"), **facts)


class UsageError(MirrordError):
    code, title, http_status, exit_status = "usage", "Wrong usage", 400, 2


class InvalidConfigError(UsageError):
    code, title = "invalid-config", "Invalid configuration"


class InvalidRequestError(UsageError):
    code, title = "invalid-request", "Invalid request"


class BodyTooLargeError(UsageError):
    code, title, http_status = "body-too-large", "Request body too large", 413


class TtlTooLongError(UsageError):
    code, title = "ttl-too-long", "Time to live too long"


class InvalidNameError(UsageError):
    code, title = "invalid-name", "Invalid name"


class InvalidUrlError(UsageError):
    code, title = "invalid-url", "Invalid upstream URL"


class InvalidCommitError(UsageError):
    code, title = "invalid-commit", "Invalid commit"


class InvalidDatasetError(UsageError):
    code, title = "invalid-dataset", "Invalid dataset"


class InvalidMappingError(UsageError):
    code, title = "invalid-mapping", "Invalid mapping"


class InvalidRecipeError(UsageError):
    code, title = "invalid-recipe", "Invalid recipe"


class InvalidBundleError(UsageError):
    code, title = "invalid-bundle", "Invalid bundle"


class InvalidPatchError(UsageError):
    code, title = "invalid-patch", "Invalid patch"


class PathOutsideCheckoutError(UsageError):
    code, title = "path-outside-checkout", "Path outside the checkout"


class AccessError(MirrordError):
    code, title, http_status, exit_status = "not-allowed", "Not allowed", 403, 3


class OwnerDeniedError(AccessError):
    code, title = "owner-denied", "The checkout's owner may not"


class NotFoundError(MirrordError):
    code, title, http_status, exit_status = "not-found", "Not found", 404, 4


class MirrorNotFoundError(NotFoundError):
    code, title = "mirror-not-found", "No such mirror"


class DatasetNotFoundError(NotFoundError):
    code, title = "dataset-not-found", "No such dataset"


class InstanceNotFoundError(NotFoundError):
    code, title = "instance-not-found", "No such instance"


class RecipeNotFoundError(NotFoundError):
    code, title = "recipe-not-found", "No recipe for the instance"


class CommitNotFoundError(NotFoundError):
    code, title = "commit-not-found", "No such commit"


class CheckoutNotFoundError(NotFoundError):
    code, title = "checkout-not-found", "No such checkout"


class SnapshotNotFoundError(NotFoundError):
    code, title = "snapshot-not-found", "No such snapshot"


class EnvironmentNotFoundError(NotFoundError):
    code, title = "environment-not-found", "No such environment"


class LayerNotFoundError(NotFoundError):
    code, title = "layer-not-found", "No such layer"


class OperationNotFoundError(NotFoundError):
    code, title = "operation-not-found", "No such operation"


class AuditNotFoundError(NotFoundError):
    code, title = "audit-not-found", "No such audit"


class PinNotFoundError(NotFoundError):
    code, title = "pin-not-found", "No such pin"


class PathNotFoundError(NotFoundError):
    code, title = "path-not-found", "No such path"


class ConflictError(MirrordError):
    code, title, http_status, exit_status = "conflict", "Conflict", 409, 5


class AlreadyRunningError(ConflictError):
    code, title = "already-running", "A daemon already holds the state directory"


class MirrorExistsError(ConflictError):
    code, title = "mirror-exists", "The mirror exists"


class InstanceAmbiguousError(ConflictError):
    code, title = "instance-ambiguous", "Several datasets record the instance differently"


class MirrorInUseError(ConflictError):
    code, title = "mirror-in-use", "The mirror is in use"


class CheckoutBusyError(ConflictError):
    code, title = "checkout-busy", "The checkout is busy"


class SnapshotExistsError(ConflictError):
    code, title = "snapshot-exists", "The snapshot exists"


class LayerExistsError(ConflictError):
    code, title = "layer-exists", "The layer exists"


class LayerInUseError(ConflictError):
    code, title = "layer-in-use", "The layer is in use"


class EnvironmentInUseError(ConflictError):
    code, title = "environment-in-use", "The environment is in use"


class TreeRefusedError(ConflictError):
    code, title = "tree-refused", "git refuses what is in the checkout"


class PatchConflictError(ConflictError):
    code, title = "patch-conflict", "The patch does not apply"


class SteeringRefusedError(ConflictError):
    code, title = "steering-refused", "The change could steer the tests"


class CatalogTooNewError(ConflictError):
    code, title = "catalog-too-new", "The catalog was written by a newer version"


class StateTooNewError(ConflictError):
    code, title = "state-too-new", "The state directory was written by a newer version"


class OperationFinishedError(ConflictError):
    code, title = "operation-finished", "The operation has finished"


class CancelledError(ConflictError):
    code, title = "cancelled", "Cancelled"


class ProcessGoneError(ConflictError):
    code, title = "process-gone", "The process has ended"


class ClaimLostError(ConflictError):
    code, title = "claim-lost", "Another node has claimed it"


class UpstreamError(MirrordError):
    code, title, http_status, exit_status = "upstream-failed", "Upstream failed", 502, 6


class UpstreamNotFoundError(UpstreamError):
    code, title = "upstream-not-found", "Upstream not found"


class UpstreamAuthError(UpstreamError):
    code, title = "upstream-auth", "Upstream wants credentials"


class UpstreamEmptyError(UpstreamError):
    code, title = "upstream-empty", "Upstream has no refs"


class UpstreamLossError(UpstreamError):
    code, title = "upstream-loss", "Upstream lost most of what it had"


class UpstreamTimeoutError(UpstreamError):
    code, title = "upstream-timeout", "Upstream too slow"


class UpstreamThrottledError(UpstreamError):
    code, title = "upstream-throttled", "Upstream throttles us"


class ResourceError(MirrordError):
    code, title, http_status, exit_status = "resource", "A resource is missing", 503, 7


class DiskFullError(ResourceError):
    code, title, http_status = "disk-full", "Disk full", 507


class DiskFailedError(ResourceError):
    code, title = "disk-failed", "The disk failed"


class CatalogUnavailableError(ResourceError):
    code, title = "catalog-unavailable", "The catalog cannot be reached"


class CatalogFullError(CatalogUnavailableError):
    code, title, http_status = "catalog-full", "The catalog's server has no room", 507


class CatalogConflictError(ResourceError):
    code, title = "catalog-conflict", "The catalog was changed at the same time"


class StoreUnavailableError(ResourceError):
    code, title = "store-unavailable", "The store cannot be reached"


class StoreFullError(StoreUnavailableError):
    code, title, http_status = "store-full", "The store is full", 507


class TooManyCheckoutsError(ResourceError):
    code, title = "too-many-checkouts", "Too many checkouts"


class TooManySnapshotsError(ResourceError):
    code, title = "too-many-snapshots", "Too many snapshots"


class TooManyLayersError(ResourceError):
    code, title = "too-many-layers", "Too many layers"


class LimitReachedError(ResourceError):
    code, title = "limit-reached", "A limit is reached"


class TooManyRequestsError(ResourceError):
    code, title, http_status = "too-many-requests", "Too many requests of one user", 429


class OverloadedError(ResourceError):
    code, title = "overloaded", "Too many requests of all users"


class QuotaExceededError(ResourceError):
    code, title, http_status = "quota-exceeded", "Too much disk of one user", 507


class TooManyConnectionsError(ResourceError):
    code, title = "too-many-connections", "Too many connections"


class TooManyFilesError(ResourceError):
    code, title = "too-many-files", "Too many open files"


class DiffTooLargeError(ResourceError):
    code, title, http_status = "diff-too-large", "The changes are too large", 422


class ForkTooLargeError(ResourceError):
    code, title, http_status = "fork-too-large", "The checkout has too much to copy", 422


class TreeTooLargeError(ResourceError):
    code, title, http_status = "tree-too-large", "The commit's tree is too large", 422


class BackendUnavailableError(ResourceError):
    code, title = "backend-unavailable", "This host lacks the backend"


class DeadlineError(ResourceError):
    code, title, http_status = "deadline-exceeded", "Deadline exceeded", 504


class WorkerCrashedError(ResourceError):
    code, title = "worker-crashed", "A worker process died"


class OutOfMemoryError(ResourceError):
    code, title = "out-of-memory", "Too little memory for the request"


class GitFailedError(ResourceError):
    code, title = "git-failed", "git failed"


class GitKilledError(ResourceError):
    code, title = "git-killed", "git was killed"


class StoppingError(ResourceError):
    code, title = "stopping", "The daemon is stopping"


class IntegrityError(MirrordError):
    code, title, http_status, exit_status = "integrity", "Integrity", 424, 8


class CommitUnservableError(IntegrityError):
    code, title = "commit-unservable", "A recorded commit cannot be served"


class EnvironmentFailedError(IntegrityError):
    code, title = "environment-failed", "The environment cannot be built"


class ProofFailedError(IntegrityError):
    code, title = "proof-failed", "A proof failed"


class CorruptObjectError(IntegrityError):
    code, title = "corrupt-object", "A corrupt object"


class DamagedMirrorError(CorruptObjectError):
    code, title = "damaged-mirror", "A mirror is damaged"


class StoreDamagedError(IntegrityError):
    code, title = "store-damaged", "An object of the store is not what it should be"


class CorruptCatalogError(IntegrityError):
    code, title = "corrupt-catalog", "The catalog is damaged"


class NoDaemonError(MirrordError):
    code, title, http_status, exit_status = "no-daemon", "No daemon", 503, 9


class InternalError(MirrordError):
    code, title, http_status, exit_status = "internal", "Internal error", 500, 1
