"""Images: fetched by skopeo(1), unpacked by umoci(1), kept as layers that images share.

An image is an environment whose prefix is a root file system: layers of overlayfs in
`.environments/.layers`, each named by the digest of its content and unpacked once. Only this module
runs the two programs, as the daemon's user. A fetched image stays in `environments/images` until it
is imported, so an import that is repeated after a failure continues.
"""

import asyncio
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ... import errors, protocol
from ...errors import InvalidImageError, full_disk_named
from ...host.children import NOTHING, Child, start
from ...jobs.operations import together
from ...mirrors.service import Mirrors
from ...model import ENVIRONMENT_KEY, EnvironmentName, shown
from ...presence import matching
from ...protocol import Progress, ProgressSink
from ...templates.environments import RECORD, EnvironmentStore
from ..recipes import COMMIT, slug
from .layers import Listing, User, find_links, find_user, finish_layer, list_layer, make_cover
from .layouts import (
    ImageLayer,
    find_tree,
    make_single,
    read_image,
    variables_of,
    words_of,
    wrap_archive,
)

# 20 GiB, the largest image by default, at 1 MB a second
_FETCH_TIMEOUT = timedelta(hours=6)
# 450 MB take umoci 9 s
_LAYER_TIMEOUT = timedelta(hours=1)
_AT_ONCE = 2
_LOOPBACK = re.compile(r"docker://(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?/")
_TAIL_BYTES = 2000
# sandboxes mount their own there, which fails on a link that leads nowhere
_GIVEN = ("etc/hosts", "etc/resolv.conf", "etc/gitconfig")
REGISTRY = "docker://"
# kinds of uploads; `rootfs` is an archive of a root file system
ARCHIVES = ("docker-archive", "oci-archive", "rootfs")


@dataclass(kw_only=True, eq=False, repr=False)
class Images:
    """Imports images into one store. Belongs to one event loop."""

    place: Path
    store: EnvironmentStore
    mirrors: Mirrors
    # two imports would unpack a layer that they share at the same place
    _unpacking: anyio.Lock = field(default_factory=anyio.Lock)
    _fetching: dict[str, anyio.Lock] = field(default_factory=lambda: defaultdict(anyio.Lock))
    _running: int = 0

    async def add(
        self, request: protocol.ImportImage, upload: Path | None, progress: ProgressSink
    ) -> protocol.BuildReport:
        """Import an image; a refusal is reported, and kept as a failed environment."""
        source = request.source
        if source.startswith(REGISTRY) and (not source.isprintable() or " " in source):
            raise errors.InvalidRequestError(
                f"cannot import image {shown(source)}: its name has spaces or control characters",
                hint="name it as docker does: docker://REGISTRY/REPOSITORY:TAG",
            )
        key = key_of_image(request)
        if not ENVIRONMENT_KEY.fullmatch(key):
            raise errors.InvalidRequestError(
                f"cannot name an environment {shown(key)}: a key has a-z, 0-9, '.', '_' and '-'",
                hint="name one with --key",
            )
        self._running += 1
        try:
            content = await self._add(key, request, upload, progress)
        finally:
            self._running -= 1
        name = str(EnvironmentName(key, content["digest"]))
        if content["error"]:
            detail = f"cannot import image {request.source}: {content['error']}"
            failure = protocol.FailedBuild(key=key, detail=detail)
            return protocol.BuildReport(ready=[], failed=[failure])
        return protocol.BuildReport(ready=[name])

    async def _add(
        self, key: str, request: protocol.ImportImage, upload: Path | None, progress: ProgressSink
    ) -> dict[str, Any]:
        """Fetch, unpack and publish an image; return the facts of its record."""
        await self.mirrors.room.ensure("import an image")
        began = time.time()
        self.mirrors.events.publish("environment.started", key=key, digest="")
        content: dict[str, Any] = {"key": key, "source": request.source, "recipe": None}
        content |= {"mirror": None, "commit": None, "interpreter": None, "tail": []}
        try:
            async with self._fetched(request.source, upload, progress) as fetched, self._unpacking:
                content |= await self._unpacked(fetched, request, progress)
                content |= {"state": "ready", "error": None}
                # before others sweep, to whom its layers would have no image
                await self._publish(content, began)
        except InvalidImageError as error:
            content |= {"state": "failed", "error": error.message.partition(": ")[2]}
            text = json.dumps([key, request.source])
            content["digest"] = hashlib.sha256(text.encode()).hexdigest()
            async with self._unpacking:
                await self._publish(content, began)
        return content

    async def _publish(self, content: dict[str, Any], began: float) -> None:
        """Make the environment of a record; nothing changes where it exists. A failure goes with
        the next import of the key.
        """
        content |= {"at": time.time(), "duration_s": round(time.time() - began, 3)}
        digest, is_ready = content["digest"], content["state"] == "ready"
        for record in list(self.store.iter_records(content["key"])):
            if "image" not in record.facts and record.facts["recipe"] is None:
                self.store.remove(record.digest)
        existing = self.store.record(digest)
        if is_ready and not (existing and existing.is_ready):
            path = self.store.new_path()
            path.mkdir(mode=0o700)
            try:
                tree = content["image"]["tree"]
                below = [self.store.layers / name for name in content["stack"]]
                cover = await anyio.to_thread.run_sync(find_links, _GIVEN, below)
                cover += [tree] if tree in content["image"]["repositories"] else []
                await anyio.to_thread.run_sync(make_cover, path / "files", cover, below)
                self._write(path, content)
            finally:
                self.mirrors.trash.add(path)
        elif not is_ready:
            path = self.store.new_path()
            path.mkdir(mode=0o700)
            self._write(path, content)
        name = "environment.built" if is_ready else "environment.failed"
        named = ("key", "digest", "duration_s", *(("files", "size_bytes", "shared_bytes")
                 if is_ready else ()))  # fmt: skip
        more = {} if is_ready else {"detail": content["error"]}
        self.mirrors.events.publish(name, **{field: content[field] for field in named}, **more)

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        with full_disk_named("an environment"):
            (path / "log").write_text(f"imported from {content['source']}\n")
            (path / RECORD).write_text(json.dumps(content))
        self.store.add(path, content["digest"])

    def sweep(self) -> None:
        """Remove the layers that no image has, unless an import may be about to use them."""
        if not self._running:
            self.store.sweep_layers()

    def drop_unused(self) -> None:
        """Remove what imports that failed have fetched and unpacked, unless one runs; also the
        repositories of images whose mirrors are gone.
        """
        self.mirrors.trash.add(*self.fetched())
        named = {name.key for name in self.mirrors.names()}
        places = matching(self.place / "repositories", "[!.]*")
        self.mirrors.trash.add(*(path for path in places if path.name not in named))
        self.sweep()

    def fetched(self) -> list[Path]:
        """Return what imports that failed have fetched; nothing while one runs."""
        return sorted(matching(self.place / "images", "*")) if not self._running else []

    # -- fetching ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _fetched(
        self, source: str, upload: Path | None, progress: ProgressSink
    ) -> AsyncIterator[Path]:
        """Yield an OCI layout with the image; it is kept if the block fails for another reason than
        the image itself.
        """
        progress(Progress(done=0, unit="layers", note=f"fetching {source}"))
        if source.startswith(REGISTRY):
            name = hashlib.sha256(source.encode()).hexdigest()[:32]
            place = self.place / "images" / name
            async with self._fetching[name]:
                await anyio.to_thread.run_sync(lambda: place.mkdir(0o700, True, True))
                await self._copy(source, place)
                try:
                    yield place
                except InvalidImageError:
                    await anyio.to_thread.run_sync(shutil.rmtree, place, True)
                    raise
                await anyio.to_thread.run_sync(shutil.rmtree, place, True)
            return
        async with self.mirrors.quarantine.directory("image") as place:
            kind, _, name = source.partition(":")
            assert upload is not None
            if kind == "rootfs":
                await anyio.to_thread.run_sync(wrap_archive, upload, place)
            else:
                reference = ":".join(name.split(":")[1:])
                await self._copy(f"{kind}:{upload}{reference and ':' + reference}", place)
            yield place

    async def _copy(self, source: str, place: Path) -> None:
        settings = self.mirrors.settings().environments
        # skopeo(1): a policy file is not needed then; temporary files would go to /var/tmp
        options = ["--insecure-policy", f"--tmpdir={place}"]
        # plain layers would be compressed; a layout has no place for signatures, and a signed image
        # would be refused
        own = ["--dest-oci-accept-uncompressed-layers", "--remove-signatures"]
        is_registry = source.startswith(REGISTRY)
        if is_registry and settings.auth_file:
            own.append(f"--src-authfile={settings.auth_file}")
        if _LOOPBACK.match(source):  # as docker does
            own.append("--src-tls-verify=false")
        argv = ["skopeo", *options, "copy", "--quiet", *own, source, f"oci:{place}:image"]
        failure = await _run(argv, place, _FETCH_TIMEOUT)
        if failure and is_registry:
            kind = errors.UpstreamAuthError if _is_denied(failure) else errors.UpstreamError
            raise kind(f"cannot fetch image {source}: {failure}", hint=_HINT)
        if failure:
            raise InvalidImageError(f"cannot read the image: {failure}")

    # -- unpacking ---------------------------------------------------------------------------------

    async def _unpacked(
        self, place: Path, request: protocol.ImportImage, progress: ProgressSink
    ) -> dict[str, Any]:
        """Unpack the layers that are not here; return the facts of a record."""
        config, layers = await anyio.to_thread.run_sync(read_image, place)
        done = shared_bytes = 0
        names: list[str | None] = [None] * len(layers)
        kept: list[dict[str, Any]] = [{} for _ in layers]
        opaque: dict[int, tuple[Path, Listing]] = {}
        turns = asyncio.Semaphore(_AT_ONCE)
        self.store.layers.mkdir(mode=0o700, parents=True, exist_ok=True)

        async def one(number: int, layer: ImageLayer) -> None:
            nonlocal done, shared_bytes
            async with turns:
                stored = await anyio.to_thread.run_sync(self.store.read_layer, layer.name)
                if stored is not None:
                    shared_bytes += stored["size_bytes"]
                    names[number], kept[number] = layer.name, stored
                else:
                    root, listing = await self._unpack(place, layer)
                    if listing.opaque:
                        opaque[number] = root, listing
                    else:
                        kept[number] = await self._finish(layer.name, root, listing, [])
                        names[number] = layer.name
            done += 1
            note = f"unpacking {request.source}"
            progress(Progress(done=done, total=len(layers), unit="layers", note=note))

        try:
            await together(one(number, layer) for number, layer in enumerate(layers))
            # last and from the bottom: what these hide is in the layers below them. Their whiteouts
            # are right above those only, so the name is that of the whole stack.
            for number, (root, listing) in sorted(opaque.items()):
                chain = "\n".join(layer.diff_id for layer in layers[: number + 1])
                name = hashlib.sha256(chain.encode()).hexdigest()
                below = [self.store.layers / str(lower) for lower in reversed(names[:number])]
                kept[number] = await self._finish(name, root, listing, below)
                names[number] = name
        finally:
            for path in matching(self.store.layers, ".building-*"):
                self.mirrors.trash.add(path)
        stack = [str(name) for name in reversed(names)]
        return await self._described(config, stack, kept, request) | {"shared_bytes": shared_bytes}

    async def _unpack(self, place: Path, layer: ImageLayer) -> tuple[Path, Listing]:
        """Unpack one layer by umoci, as an image of that layer alone."""
        limit = self.mirrors.settings().environments.image_bytes
        blob = place / "blobs/sha256" / layer.blob.removeprefix("sha256:")
        listing = await self.mirrors.workers.run(
            list_layer, blob, layer.diff_id, limit, timeout=_LAYER_TIMEOUT
        )
        single = place / f"single-{layer.name}"
        root = self.store.layers / f".building-{layer.name}"
        await anyio.to_thread.run_sync(make_single, place, single, layer)
        # left by a kill; umoci wants a path that does not exist
        await anyio.to_thread.run_sync(shutil.rmtree, root, True)
        argv = ["umoci", "raw", "unpack", "--rootless", f"--image={single}:layer", str(root)]
        if failure := await _run(argv, place, _LAYER_TIMEOUT):
            raise InvalidImageError(f"cannot unpack the image: {failure}")
        return root, listing

    async def _finish(
        self, name: str, root: Path, listing: Listing, below: list[Path]
    ) -> dict[str, Any]:
        dropped = await self.mirrors.workers.run(
            finish_layer, root, listing, below, timeout=_LAYER_TIMEOUT
        )
        content = {"files": listing.files, "size_bytes": listing.size_bytes, "dropped": dropped}
        content["repositories"] = listing.repositories
        await anyio.to_thread.run_sync(self.store.add_layer, root, name, content)
        return content

    async def _described(
        self, config: dict[str, Any], stack: list[str], kept: list[dict[str, Any]],
        request: protocol.ImportImage,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a record says of an image, whose `stack` of layers begins with the top."""
        own = config.get("config") or {}
        paths = [self.store.layers / name for name in stack]
        user: User = await anyio.to_thread.run_sync(find_user, paths, str(own.get("User") or ""))
        repositories = sorted({path for layer in kept for path in layer["repositories"]})
        workdir = os.path.normpath(str(own.get("WorkingDir") or "/"))
        image = {
            "layers": len(stack), "uid": user.uid, "gid": user.gid,
            "user": user.name, "home": user.home, "workdir": workdir,
            "variables": dict(variables_of(own)), "entrypoint": words_of(own, "Entrypoint"),
            "command": words_of(own, "Cmd"), "repositories": repositories,
            "tree": request.tree or find_tree(workdir, repositories),
        }  # fmt: skip
        dropped: dict[str, int] = {}
        for layer in kept:
            for reason, count in layer["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + count
        text = json.dumps([request.key, request.source, image, stack], sort_keys=True)
        return {
            "digest": hashlib.sha256(text.encode()).hexdigest(), "image": image, "stack": stack,
            "files": sum(layer["files"] for layer in kept),
            "size_bytes": sum(layer["size_bytes"] for layer in kept),
            "dropped": dropped, "findings": [], "manifest": None,
        }  # fmt: skip


_HINT = "credentials of registries: `[environments] auth_file`, made by `skopeo login --authfile`"


def key_of_image(request: protocol.ImportImage) -> str:
    """Return the key of an image. Members see it, so it names no commit, which may be the fix."""
    if request.key:
        return request.key
    name = request.source.partition(":")[2].strip("/") or "image"
    return slug(COMMIT.sub(lambda it: hashlib.sha256(it[0].encode()).hexdigest()[:12], name))


def _is_denied(text: str) -> bool:
    return any(word in text for word in ("unauthorized", "authentication required", "denied"))


async def _run(argv: Sequence[str], scratch: Path, timeout: timedelta) -> str | None:
    """Run a program to its end; return the end of what it said if it failed."""
    program = shutil.which(argv[0])
    if program is None:
        raise errors.ResourceError(
            f"cannot import an image: {argv[0]} is not installed",
            hint=f"install it: `apt-get install {argv[0]}`",
        )
    # not the daemon's HOME and /run: skopeo would take the credentials that it finds there, and
    # fail for an ordinary user where only root may enter /run/containers
    variables = dict.fromkeys(("HOME", "TMPDIR", "XDG_RUNTIME_DIR"), str(scratch))
    variables["PATH"] = os.defpath
    tail = b""
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            process = start([program, *argv[1:]], variables, scratch, stdout=NOTHING)
            async with Child(process) as child:
                while piece := await child.read_stderr():
                    tail = (tail + piece)[-_TAIL_BYTES:]
                status = await child.wait()
    except TimeoutError:
        return f"{argv[0]} took longer than {timeout}"
    lines = tail.decode(errors="replace").strip().splitlines()
    # skopeo writes as logrus does: time="…" level=fatal msg="…"
    last = re.sub(r'.*level=(?:fatal|error) msg="(.*)"$', r"\1", lines[-1]) if lines else ""
    last = last.lstrip(" ⨯")  # as umoci says what failed
    # Go's programs end with the text of the system's error
    for number in (errno.ENOSPC, errno.EDQUOT):
        if status and last.endswith(os.strerror(number).lower()):
            with full_disk_named("an image"):
                raise OSError(number, os.strerror(number))
    return (last.replace(str(scratch), "") or f"{argv[0]} ended with {status}") if status else None
