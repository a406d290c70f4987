"""The volume driver for docker and podman: docker's plugin protocol over the service of volumes.

The engine posts JSON to `/Plugin.Activate` and `/VolumeDriver.…` on a socket that only root may
open. Every answer has `Err`, empty on success (docker's page "Docker volume plugins").
"""

from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..checkouts.lease import Lease, Volume
from ..checkouts.volumes import Existing, ForkOf, Source, path_of
from ..engine.engine import Engine
from ..errors import AccessError, InvalidRequestError, NotFoundError
from ..host.peers import Peer
from ..jobs.operations import answering
from ..jsontext import dumps, loads
from ..model import shown
from ..protocol import ForkCheckout, StartCheckout
from ..telemetry import bind_request, new_request_id
from ..workers.turns import Askers
from .request import JSON_LIMIT_BYTES, Body, invalid_request, problem_response, read_body

MEDIA_TYPES = tuple(f"application/vnd.docker.plugins.v1{minor}+json" for minor in ("", ".1", ".2"))
PARTS = ("tree", "environment", "directory")


class _Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _PluginCall(BaseModel):
    """The body of a call. docker omits unused members, podman sends null."""

    # docker's characters for names of volumes; empty in calls that name none
    Name: Annotated[str, Field(pattern=r"^([a-zA-Z0-9][a-zA-Z0-9_.-]{0,254})?$")] = ""
    ID: Annotated[str, Field(max_length=500)] = ""
    Opts: dict[str, str] | None = None


class VolumeDriver:
    """The ASGI application of the plugin's socket."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bind_request(new_request_id())
        scope["state"]["body"] = body = Body(receive, self._held)
        request = Request(scope, body.receive)
        with answering():
            try:
                status, answer = 200, {"Err": "", **await self._respond(request)}
            except Exception as error:  # noqa: BLE001  # problem_response logs bugs
                problem = problem_response(error)
                members = loads(bytes(problem.body))
                text = "; ".join(filter(None, (members["detail"], members.get("hint"))))
                # not 404, which tells docker that the driver lacks the call
                status, answer = 500, {"Err": f"mirrord: {text}"}
            finally:
                body.release()
            accepted = request.headers.get("accept", "")
            kind = accepted if accepted in MEDIA_TYPES else MEDIA_TYPES[1]
            response = Response(dumps(answer), status, media_type=kind)
            await response(scope, receive, send)

    async def _respond(self, request: Request) -> dict[str, Any]:
        peer: Peer = request.state.connection.peer
        if not self._engine.access.is_admin(peer.uid):
            raise AccessError("cannot serve volumes: only administrators may request them")
        if not self._engine.settings().docker.volumes:
            hint = "set it in the daemon's configuration, and restart the daemon"
            raise InvalidRequestError("cannot serve volumes: [docker] volumes is false", hint=hint)
        Askers(self._engine.access.user_of(peer.uid)).bind()
        content = await read_body(request, JSON_LIMIT_BYTES)
        try:
            call = _PluginCall.model_validate_json(content or b"{}")
        except ValidationError as error:
            raise invalid_request("body", error) from error
        return await self._answer(request, call, peer)

    async def _answer(self, request: Request, call: _PluginCall, peer: Peer) -> dict[str, Any]:
        path = request.scope["path"]  # docker's Host header is a path, which breaks `request.url`
        match path:
            case "/Plugin.Activate":
                return {"Implements": ["VolumeDriver"]}
            case "/VolumeDriver.Capabilities":
                # each engine of a swarm has volumes of its own
                return {"Capabilities": {"Scope": "local"}}
        await self._engine.wait_until_open()
        volumes = self._engine.volumes
        match path:
            case "/VolumeDriver.List":
                return {"Volumes": [_volume_facts(*pair) for pair in volumes.list()]}
            case "/VolumeDriver.Create":
                part, options, source = _read_options(call.Name, call.Opts or {})
                is_new = await volumes.create(call.Name, part, options, source, peer)
                if is_new and request.state.connection.is_lost:  # podman gives up after 5 seconds
                    await volumes.remove(call.Name, peer)
                return {}
            case "/VolumeDriver.Get":
                return {"Volume": _volume_facts(*volumes.get(call.Name))}
            case "/VolumeDriver.Path":
                return {"Mountpoint": path_of(*volumes.get(call.Name))}
            case "/VolumeDriver.Mount":
                return {"Mountpoint": await volumes.mount(call.Name, call.ID, peer)}
            case "/VolumeDriver.Unmount":
                if volumes.find(call.Name):
                    await volumes.unmount(call.Name, call.ID, peer)
                return {}
            case "/VolumeDriver.Remove":
                if volumes.find(call.Name):  # an expired volume is removed already
                    await volumes.remove(call.Name, peer)
                return {}
        raise NotFoundError("cannot answer the request: no such call of a volume driver")


def _volume_facts(lease: Lease, volume: Volume) -> dict[str, Any]:
    status = {
        "checkout": lease.id,
        "instance": lease.base.instance,
        "mirror": str(lease.mirror),
        "commit": lease.base.commit,
        "part": volume.part,
        "owner_uid": lease.terms.owner_uid,
        "expires_at": lease.terms.expires_at.isoformat(timespec="seconds"),
        "mounts": len(volume.mounted_by),
    }
    created_at = lease.terms.created_at.isoformat(timespec="seconds")
    mountpoint = path_of(lease, volume)
    return {
        "Name": volume.name, "Mountpoint": mountpoint, "CreatedAt": created_at, "Status": status,
    }  # fmt: skip


_START, _FORK = TypeAdapter(StartCheckout), TypeAdapter(ForkCheckout)


def _read_options(name: str, given: dict[str, str]) -> tuple[str, dict[str, str], Source]:
    """Return the part of the checkout that a volume shows, its options, and its source.

    Without a source, the name up to `--` is an instance: `docker run -v` accepts no options.
    """
    if not name:
        raise InvalidRequestError("cannot make a volume: it has no name")
    options = {"owner" if key == "uid" else key: value for key, value in given.items()}
    choices = dict(options)
    part = choices.pop("what", "tree")
    if part not in PARTS:
        hint = f"`what` is one of {', '.join(PARTS)}"
        raise InvalidRequestError(f"cannot make volume {name}: no part {shown(part)}", hint=hint)
    checkout, fork = choices.pop("checkout", None), choices.pop("fork", None)
    if not (checkout or fork or choices.keys() & {"instance", "mirror"}):
        choices["instance"] = name.rpartition("--")[0] or name
    if "bind" in choices:
        fact = f"cannot make volume {name}: a volume cannot be bound to a process"
        raise InvalidRequestError(fact, hint="leave out bind")
    try:
        if checkout:
            _Nothing.model_validate_strings(choices)
            return part, options, Existing(checkout)
        if fork:
            return part, options, ForkOf(fork, _FORK.validate_strings(choices))
        return part, options, _START.validate_strings(choices)
    except ValidationError as error:
        faults = invalid_request("options", error).facts["faults"]
        listing = "; ".join(f"{fault['key']}: {fault['message']}" for fault in faults)
        hint = "docs/integrations.md lists the options of volumes"
        raise InvalidRequestError(f"cannot make volume {name}: {listing}", hint=hint) from error
