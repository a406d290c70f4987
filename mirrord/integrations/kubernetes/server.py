"""The CSI services Identity and Node over gRPC; errors become status codes."""

import errno
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import grpc

from ... import __version__
from ...errors import InvalidRequestError, MirrordError, NoDaemonError
from . import csi_pb2 as csi
from . import csi_pb2_grpc as services
from .volumes import PodVolumes, PublishedElsewhereError, PublishedOtherwiseError, read_attributes

NAME = "csi.mirrord.dev"
_MODES = csi.VolumeCapability.AccessMode
# by the CSI specification, in which ABORTED is another call for the same volume
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

log = logging.getLogger("mirrord.kubernetes")
S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")


def code_of(error: MirrordError | OSError) -> grpc.StatusCode:
    """Return the status code of an error; the kubelet retries in any case."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return grpc.StatusCode.RESOURCE_EXHAUSTED if is_full else grpc.StatusCode.INTERNAL
    if isinstance(error, PublishedOtherwiseError):
        return grpc.StatusCode.ALREADY_EXISTS
    if isinstance(error, PublishedElsewhereError):
        return grpc.StatusCode.FAILED_PRECONDITION
    return _CODES.get(error.http_status, grpc.StatusCode.INTERNAL)


def _with_status(
    method: Callable[[S, Q, grpc.ServicerContext], A],
) -> Callable[[S, Q, grpc.ServicerContext], A]:
    @wraps(method)
    def answer(self: S, request: Q, context: grpc.ServicerContext) -> A:
        try:
            return method(self, request, context)
        except (MirrordError, OSError) as error:
            hint = error.hint if isinstance(error, MirrordError) else None
            text = "; ".join(filter(None, (str(error), hint)))
            log.warning("%s: %s", method.__name__, text)
            # raises by itself; the `raise` below is for type checkers
            context.abort(code_of(error), text)
            raise

    return answer


class Plugin(services.IdentityServicer, services.NodeServicer):
    """The plugin of a node: its identity and health, and the volumes of its pods."""

    def __init__(self, name: str, volumes: PodVolumes) -> None:
        self._name, self._volumes = name, volumes

    @_with_status
    def GetPluginInfo(self, _: Any, __: grpc.ServicerContext) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=NAME, vendor_version=__version__)

    @_with_status
    def GetPluginCapabilities(
        self, _: Any, __: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        return csi.GetPluginCapabilitiesResponse()

    @_with_status
    def Probe(self, _: Any, __: grpc.ServicerContext) -> csi.ProbeResponse:
        """Ready if the daemon answers, even if it is degraded."""
        try:
            self._volumes.client.health()
        except NoDaemonError:
            return csi.ProbeResponse(ready={"value": False})
        return csi.ProbeResponse(ready={"value": True})

    @_with_status
    def NodeGetInfo(self, _: Any, __: grpc.ServicerContext) -> csi.NodeGetInfoResponse:
        return csi.NodeGetInfoResponse(node_id=self._name)

    @_with_status
    def NodeGetCapabilities(
        self, _: Any, __: grpc.ServicerContext
    ) -> csi.NodeGetCapabilitiesResponse:
        return csi.NodeGetCapabilitiesResponse()

    @_with_status
    def NodePublishVolume(
        self, request: csi.NodePublishVolumeRequest, _: grpc.ServicerContext
    ) -> csi.NodePublishVolumeResponse:
        attributes = read_attributes(request.volume_context)
        _check(request.volume_capability)
        self._volumes.publish(
            request.volume_id, request.target_path, attributes, read_only=request.readonly
        )
        return csi.NodePublishVolumeResponse()

    @_with_status
    def NodeUnpublishVolume(
        self, request: csi.NodeUnpublishVolumeRequest, _: grpc.ServicerContext
    ) -> csi.NodeUnpublishVolumeResponse:
        self._volumes.unpublish(request.volume_id, request.target_path)
        return csi.NodeUnpublishVolumeResponse()


_SINGLE_NODE = {
    _MODES.SINGLE_NODE_WRITER,
    _MODES.SINGLE_NODE_READER_ONLY,
    _MODES.SINGLE_NODE_SINGLE_WRITER,
    _MODES.SINGLE_NODE_MULTI_WRITER,
}


def _check(wanted: csi.VolumeCapability) -> None:
    """Raise if a checkout cannot have a capability; Kubernetes wants SINGLE_NODE_WRITER."""
    hint = "remove fsType and mount options: a volume is a directory on a single node"
    if not wanted.HasField("mount") or wanted.mount.fs_type or wanted.mount.mount_flags:
        raise InvalidRequestError("cannot publish the volume: it is not a block device", hint=hint)
    if wanted.access_mode.mode not in _SINGLE_NODE:
        raise InvalidRequestError("cannot publish the volume: access from many nodes", hint=hint)


def add_services(server: grpc.Server, name: str, volumes: PodVolumes) -> None:
    plugin = Plugin(name, volumes)
    # generated without types
    services.add_IdentityServicer_to_server(plugin, server)  # type: ignore[no-untyped-call]
    services.add_NodeServicer_to_server(plugin, server)  # type: ignore[no-untyped-call]
