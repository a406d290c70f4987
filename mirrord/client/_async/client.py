"""The client: one method per endpoint. Methods that start long work return its operation."""

import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ... import errors, model, protocol
from ...places import socket_path
from ...units import in_seconds
from .. import http
from ..archives import open_image
from ..primitives_async import Pending, async_pause, async_pieces, async_write
from .checkout import AsyncCheckout, AsyncGrade, AsyncRenewal
from .connection import AsyncConnection
from .turns import AsyncBatch, AsyncEnding, AsyncFinished, start_of

if TYPE_CHECKING:
    from .rehearsal import AsyncRehearsal

A = TypeVar("A", bound=protocol.Answer)
Q = TypeVar("Q", bound=protocol.Request)
H = TypeVar("H", bound=AsyncCheckout)
ReportProgress = Callable[[protocol.Progress], None]

# the daemon publishes the progress of an operation four times a second
_POLL_SECONDS = 0.25


class AsyncClient:
    """A client of one daemon. Close it, or use a `with` block; concurrent tasks may share it.

    `socket` is by default MIRRORD_SOCKET, else that of the configuration. `timeout` limits the
    daemon's silence within an answer. Requests that can safely be sent again wait up to `patience`
    for a restarting daemon. Requests that a busy daemon refuses are sent again when it says so,
    within `timeout` in total and at most `retries` times; 0 raises the refusal at once.

    Methods raise subclasses of MirrordError: NoDaemonError if no daemon answers, DeadlineError
    after `timeout`, else the error that the daemon reports.

        async with AsyncClient() as mirrord:
            await mirrord.wait(await mirrord.import_dataset("verified.jsonl"))
            async with mirrord.checkout("psf__requests-2317") as checkout:
                patch = await checkout.diff()
    """

    def __init__(
        self,
        socket: Path | str | None = None,
        *,
        config: Path | str | None = None,
        timeout: timedelta | float = timedelta(minutes=10),
        patience: timedelta | float = timedelta(seconds=10),
        retries: int | None = None,
    ) -> None:
        self.socket = socket_path(socket, config)
        self._patience_seconds = in_seconds(patience)
        self._connection = AsyncConnection(
            self.socket, timeout=timeout, patience=patience, retries=retries
        )
        self._renewal = AsyncRenewal()

    @classmethod
    def from_env(cls) -> Self:
        """Return the client that MIRRORD_SOCKET, MIRRORD_CONFIG and MIRRORD_LABEL describe.

        As without arguments; the name says where a program's settings come from.

        Example:
            async with AsyncClient.from_env() as mirrord:
                print((await mirrord.health()).status)
        """
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop renewing leases and close the connections."""
        await self._renewal.stop()
        await self._connection.close()

    async def _get(self, kind: type[A], *path: str, **query: Any) -> A:
        return http.read_one(await self._connection.request("GET", *path, **query), kind)

    async def _list(self, kind: type[A], *path: str, **query: Any) -> list[A]:
        return http.read_list(await self._connection.request("GET", *path, **query), kind)

    async def _post(self, kind: type[A], *path: str, **request: Any) -> A:
        return http.read_one(await self._connection.request("POST", *path, **request), kind)

    async def _finish(self, kind: type[A], *path: str, **request: Any) -> A:
        """Post, and wait for the operation that it becomes where upstream or the store is slow."""
        answer = await self._connection.request("POST", *path, **request)
        if answer.status != 202:
            return http.read_one(answer, kind)
        done = await self.wait(http.read_one(answer, protocol.Operation))
        return kind.from_json(done.result)

    async def _remove(self, *path: str, **query: Any) -> None:
        """Delete, and wait for the operation that it becomes where the store is slow."""
        answer = await self._connection.request("DELETE", *path, **query)
        if answer.status == 202:
            await self.wait(http.read_one(answer, protocol.Operation))

    async def _start(self, kind: type[Q], *path: str, **members: Any) -> protocol.Operation:
        """Post a message with these members; returns the operation."""
        return await self._post(protocol.Operation, *path, body=http.message(kind, **members))

    # -- the daemon

    async def health(self) -> protocol.Health:
        """Return whether the daemon can serve; if it is degraded, with reasons."""
        # 503 for load balancers: the body of a degraded daemon's answer is its health, too
        return await self._get(protocol.Health, "health", accepted=(503,))

    async def status(self) -> protocol.Status:
        """Return the state of the daemon: mirrors, datasets, counts, jobs, the last audit."""
        return await self._get(protocol.Status, "status")

    async def activity(self, *, history: bool = False) -> protocol.Activity:
        """Return current activity; `history` adds a point for each minute of the last day."""
        return await self._get(protocol.Activity, "activity", history=history)

    async def configuration(self) -> protocol.Configuration:
        """Return the settings in effect; for administrators."""
        return await self._get(protocol.Configuration, "config")

    async def reload(self) -> protocol.ReloadAnswer:
        """Reload the configuration; raises InvalidConfigError, and then changes nothing."""
        return await self._finish(protocol.ReloadAnswer, "reload")

    async def usage(self, *, verbose: bool = False) -> protocol.Usage:
        """Return disk usage and what `gc` would free, in bytes; `verbose` adds rows of items."""
        return await self._get(protocol.Usage, "usage", verbose=verbose)

    async def gc(self, *, dry_run: bool = False) -> protocol.Garbage:
        """Remove caches that are not in use; with `dry_run` only list them.

        Example:
            freed = await mirrord.gc(dry_run=True)
        """
        body = http.message(protocol.CollectGarbage, dry_run=dry_run)
        return await self._post(protocol.Garbage, "gc", body=body)

    async def metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return (await self._connection.request("GET", "/metrics")).body.decode()

    # -- mirrors

    async def list_mirrors(self) -> list[protocol.Mirror]:
        """Return all mirrors."""
        return await self._list(protocol.Mirror, "mirrors")

    async def get_mirror(self, name: str) -> protocol.Mirror:
        """Return a mirror, by owner/name or owner__name."""
        return await self._get(protocol.Mirror, "mirrors", _mirror(name))

    async def add_mirror(self, repo: str, url: str | None = None) -> protocol.Operation:
        """Add a mirror (owner/name) and sync it; `url` replaces the configured upstream.

        Example:
            await mirrord.wait(await mirrord.add_mirror("psf/requests"))
        """
        return await self._start(protocol.AddMirror, "mirrors", repo=repo, url=url)

    async def set_url(
        self, name: str, url: str, *, accept_loss: bool = False
    ) -> protocol.Operation:
        """Follow another upstream; `accept_loss` takes one that lacks recorded commits.

        Example:
            url = "https://git.example.com/psf/requests.git"
            await mirrord.wait(await mirrord.set_url("psf/requests", url))
        """
        path = ("mirrors", _mirror(name), "url")
        return await self._start(protocol.SetUrl, *path, url=url, accept_loss=accept_loss)

    async def sync_mirror(
        self, name: str, *, accept_loss: bool = False, retry_faults: bool = False
    ) -> protocol.Operation:
        """Sync a mirror; `accept_loss` follows an upstream that lost most of its refs.

        `retry_faults` asks at once for refs that upstream could not give lately.

        Example:
            await mirrord.wait(await mirrord.sync_mirror("psf/requests"))
        """
        path = ("mirrors", _mirror(name), "sync")
        return await self._start(
            protocol.SyncMirror, *path, accept_loss=accept_loss, retry_faults=retry_faults
        )

    async def check_credential(self, url: str) -> protocol.CredentialCheck:
        """Ask an upstream whether it accepts the credential that applies to its URL.

        Example:
            url = "https://git.example.com/psf/requests.git"
            print((await mirrord.check_credential(url)).accepted)
        """
        body = http.message(protocol.CheckCredential, url=url)
        return await self._post(protocol.CredentialCheck, "credentials", "check", body=body)

    async def remove_mirror(self, name: str) -> None:
        """Remove a mirror that no pin or checkout needs."""
        await self._remove("mirrors", _mirror(name))

    async def log_refs(self, name: str) -> list[protocol.RefRecord]:
        """Return the records of a mirror's ref history, newest first."""
        return await self._list(protocol.RefRecord, "mirrors", _mirror(name), "refs", "log")

    async def diff_refs(self, name: str, a: str, b: str) -> protocol.RefDiff:
        """Return the changes between two records of the ref history, given by ids or times.

        Example:
            changed = await mirrord.diff_refs("psf/requests", "2026-01-01T00:00:00Z", "latest")
        """
        return await self._get(protocol.RefDiff, "mirrors", _mirror(name), "refs", "diff", a=a, b=b)

    async def restore_refs(self, name: str, at: str) -> protocol.Operation:
        """Restore a mirror's refs from a record of its history; replaced tips are kept.

        Example:
            operation = await mirrord.restore_refs("psf/requests", "2026-01-01T00:00:00Z")
            await mirrord.wait(operation)
        """
        path = ("mirrors", _mirror(name), "refs", "restore")
        return await self._start(protocol.RestoreRefs, *path, at=at)

    # -- bundles

    async def create_bundle(
        self,
        name: str,
        file: Path | str,
        *,
        since: str | None = None,
        progress: ReportProgress | None = None,
    ) -> protocol.BundleFile:
        """Write a mirror with its pins, kept refs, ref history and rows into a git bundle.

        `since` is a record (an id, a time, or `latest`) that the receiver has. The file appears
        once it is complete. `progress` counts bytes.

        Example:
            await mirrord.create_bundle("psf/requests", "requests.bundle")
        """
        path = ("mirrors", _mirror(name), "bundle")
        async with self._connection.stream(*path, since=since) as (head, body):
            size = await async_write(Path(file), body, _counted(None, progress))
        mirror, record = head.headers["x-mirrord-mirror"], head.headers["x-mirrord-record"]
        return protocol.BundleFile(
            mirror=mirror, file=str(file), size_bytes=size, record=record or None, since=since
        )

    async def import_bundle(
        self,
        file: Path | str,
        *,
        mirror: str | None = None,
        progress: ReportProgress | None = None,
    ) -> protocol.Operation:
        """Import a bundle into `mirror`, by default the mirror that the bundle names.

        Example:
            await mirrord.wait(await mirrord.import_bundle("requests.bundle"))
        """
        content = _upload(Path(file), progress)
        return await self._post(protocol.Operation, "bundles", content=content, mirror=mirror)

    async def start_restore(self, *mirrors: str) -> protocol.Operation:
        """Restore mirrors, by default all, from the daemon's store, and audit them.

        Example:
            await mirrord.wait(await mirrord.start_restore("psf/requests"), timeout=3600)
        """
        return await self._start(protocol.StartRestore, "restores", mirrors=list(mirrors))

    # -- pins

    async def list_pins(self, mirror: str | None = None) -> list[protocol.Pin]:
        """Return the pins of a mirror, or of all."""
        return await self._list(protocol.Pin, "pins", mirror=mirror)

    async def pin(self, mirror: str, commit: str, reason: str = "") -> protocol.Pin:
        """Pin a commit (a full id) as its owner; its closure is verified first.

        Example:
            commit = "22623bd8c265b78b161542663ee980738441c307"
            await mirrord.pin("psf/requests", commit, reason="baseline of a paper")
        """
        body = http.message(protocol.AddPin, mirror=mirror, commit=commit, reason=reason)
        return await self._finish(protocol.Pin, "pins", body=body)

    async def unpin(self, mirror: str, commit: str, owner: str | None = None) -> None:
        """Remove your pin, or as an administrator that of `owner`."""
        await self._remove("pins", _mirror(mirror), commit, owner=owner)

    # -- datasets

    async def list_datasets(self) -> list[protocol.Dataset]:
        """Return all datasets."""
        return await self._list(protocol.Dataset, "datasets")

    async def get_dataset(self, name: str) -> protocol.Dataset:
        """Return a dataset: what it records, what of it is ready, and why the rest is not.

        Example:
            dataset = await mirrord.get_dataset("verified")
            print(dataset.ready_count, dataset.faults)
        """
        return await self._get(protocol.Dataset, "datasets", name)

    async def import_dataset(
        self,
        file: Path | str | Iterable[bytes],
        *,
        source: str | None = None,
        name: str | None = None,
        format: str | None = None,  # noqa: A002
        mapping: str | None = None,
        dry_run: bool = False,
        progress: ReportProgress | None = None,
    ) -> protocol.Operation:
        """Import a dataset: the daemon mirrors its repositories and pins its commits.

        `file` is a path, or the content in pieces; `mirrord.sources.opening.open_sources` reads
        task folders and `hf://`. `source` is its name in the catalog, by default the file's name.
        `mapping` is TOML that maps columns to fields, instead of a format. The operation's result
        is a DatasetImported; with `dry_run` nothing changes, and the result is a DatasetDiff.

        Example:
            operation = await mirrord.import_dataset("verified.jsonl")
            print((await mirrord.wait(operation)).result)
        """
        if isinstance(file, Path | str):
            source, content = source or Path(file).name, _upload(Path(file), progress)
        else:
            content = async_pieces(file, _counted(None, progress))
        query: dict[str, Any] = {"filename": source, "name": name, "format": format}
        query |= {"mapping": mapping, "dry_run": dry_run or None}
        return await self._post(protocol.Operation, "datasets", content=content, **query)

    async def prepare_dataset(self, name: str, *instances: str) -> protocol.Operation:
        """Build the templates of a dataset's instances, by default all, on this node.

        The operation's result is a Prewarmed.

        Example:
            await mirrord.wait(await mirrord.prepare_dataset("verified", "psf__requests-2317"))
        """
        path = ("datasets", name, "prepare")
        return await self._start(protocol.PrepareDataset, *path, instances=list(instances))

    async def diff_datasets(self, a: str, b: str) -> protocol.DatasetDiff:
        """Return the rows that differ between two datasets; for administrators."""
        return await self._get(protocol.DatasetDiff, "datasets", a, "diff", to=b)

    async def export_dataset(self, name: str) -> AsyncGenerator[bytes]:
        """Yield all rows, answers included, as canonical JSON lines; for administrators.

        Example:
            rows = b"".join([piece async for piece in mirrord.export_dataset("verified")])
        """
        async with self._connection.stream("datasets", name, "export") as (_, body):
            async for piece in body:
                yield piece

    async def remove_dataset(self, name: str) -> None:
        """Remove a dataset and its pins; those of other owners stay."""
        await self._remove("datasets", name)

    async def list_formats(self) -> list[protocol.FormatInfo]:
        """Return the formats of datasets."""
        return await self._list(protocol.FormatInfo, "datasets", "formats")

    async def list_instances(self, dataset: str | None = None) -> list[protocol.InstanceName]:
        """Return the names of all instances, or those of a dataset; for administrators."""
        return await self._list(protocol.InstanceName, "instances", dataset=dataset)

    async def get_instance(
        self, instance: str, *, view: model.View = model.View.AGENT, dataset: str | None = None
    ) -> protocol.Instance:
        """Return an instance; its patches are only in the grader view, for administrators.

        Example:
            print((await mirrord.get_instance("psf__requests-2317")).base_commit)
        """
        query = {"view": view.value, "dataset": dataset}
        return await self._get(protocol.Instance, "instances", instance, **query)

    # -- audits and heals

    async def start_audit(
        self,
        *mirrors: str,
        dataset: str | None = None,
        level: model.AuditLevel | None = None,
        heal: bool | None = None,
    ) -> protocol.Operation:
        """Audit the recorded commits of these mirrors, of a dataset, or all.

        Example:
            await mirrord.wait(await mirrord.start_audit(dataset="verified"))
            findings = (await mirrord.list_audits())[0].findings
        """
        scope = {"mirrors": list(mirrors), "dataset": dataset}
        return await self._start(protocol.StartAudit, "audits", **scope, level=level, heal=heal)

    async def list_audits(self) -> list[protocol.Audit]:
        """Return recent audits, newest first."""
        return await self._list(protocol.Audit, "audits")

    async def get_audit(self, audit: str) -> protocol.Audit:
        """Return an audit with its findings and repairs."""
        return await self._get(protocol.Audit, "audits", audit)

    async def list_reports(self) -> list[protocol.Report]:
        """Return reports of rehearsals and gradings, newest first."""
        return await self._list(protocol.Report, "reports")

    async def add_report(self, report: protocol.AddReport) -> protocol.Report:
        """Show a report of a rehearsal or grading on the daemon's page."""
        return await self._post(protocol.Report, "reports", body=report)

    async def start_heal(self, *mirrors: str) -> protocol.Operation:
        """Audit mirrors, by default all, at level `content`, repair findings, and audit again.

        Example:
            await mirrord.wait(await mirrord.start_heal("psf/requests"))
        """
        return await self._start(protocol.StartHeal, "heals", mirrors=list(mirrors))

    async def heal_with_bundle(
        self, mirror: str, file: Path | str, *, progress: ReportProgress | None = None
    ) -> protocol.Operation:
        """Heal a mirror with a bundle of any repository as another donor.

        Example:
            operation = await mirrord.heal_with_bundle("psf/requests", "requests.bundle")
            await mirrord.wait(operation)
        """
        content = _upload(Path(file), progress)
        path = ("mirrors", _mirror(mirror), "heal")
        return await self._post(protocol.Operation, *path, content=content)

    # -- environments

    async def list_environments(self) -> list[protocol.Environment]:
        """Return environments, and builds that failed."""
        return await self._list(protocol.Environment, "environments")

    async def get_environment(self, name: str) -> protocol.Environment:
        """Return an environment or a failed build, by KEY or KEY@DIGEST, with its recipe."""
        return await self._get(protocol.Environment, "environments", name)

    async def build_environments(
        self,
        *names: str,
        dataset: str | None = None,
        prewarm: bool = False,
        again: bool = False,
        frozen: bool = False,
        images: bool = False,
        image_name: str | None = None,
        jobs: int = 4,
    ) -> protocol.Operation:
        """Build missing environments of instances, keys or a dataset.

        The operation's result is a BuildReport. Named instances get a prepared layer; with
        `prewarm` so does every instance of the dataset. `again` retries failed builds; `frozen`
        uses no packages newer than the instance. `images` imports the images that the rows name,
        `jobs` at a time, by the template `image_name` if given.

        Example:
            await mirrord.wait(await mirrord.build_environments(dataset="verified"))
        """
        members: dict[str, Any] = {"names": list(names), "dataset": dataset, "jobs": jobs}
        members |= {"prewarm": prewarm, "again": again, "frozen": frozen}
        members |= {"images": images, "image_name": image_name}
        return await self._start(protocol.BuildEnvironments, "environments", **members)

    async def import_recipes(self, file: Path | str) -> list[protocol.Recipe]:
        """Import the recipes of a TOML file; they take precedence over those of rows.

        Example:
            keys = [recipe.key for recipe in await mirrord.import_recipes("recipes.toml")]
        """
        content, name = _upload(Path(file), None), Path(file).name
        path = ("environments", "recipes")
        response = await self._connection.request("POST", *path, content=content, filename=name)
        return http.read_list(response, protocol.Recipe)

    async def import_image(
        self,
        source: str,
        *,
        key: str | None = None,
        tree: str | None = None,
        progress: ReportProgress | None = None,
    ) -> protocol.Operation:
        """Import an image as an environment.

        `source` is `docker://REPOSITORY:TAG`, which the daemon fetches, or of this host
        `docker-archive:FILE`, `oci-archive:FILE`, `oci:DIRECTORY[:TAG]` or `dir:ROOTFS`.
        `key` names it, by default like the source. `tree` is where the image has its
        repository. The operation's result is a BuildReport.

        Example:
            operation = await mirrord.import_image("docker://debian:12", key="debian")
            await mirrord.wait(operation)
        """
        sent, archive = open_image(source)
        content = None if archive is None else async_pieces(archive, _counted(None, progress))
        path, query = ("environments", "images"), {"source": sent, "key": key, "tree": tree}
        return await self._post(protocol.Operation, *path, content=content, **query)

    async def environment_log(self, name: str, *, follow: bool = False) -> AsyncGenerator[bytes]:
        """Yield the log of a build in pieces; with `follow` until it ends.

        Example:
            async for piece in mirrord.environment_log("requests-2.3", follow=True):
                print(piece.decode(), end="")
        """
        path = ("environments", name, "log")
        async with self._connection.stream(*path, follow=follow or None) as (_, body):
            async for piece in body:
                yield piece

    async def remove_environment(self, name: str) -> None:
        """Remove an environment that no checkout uses; by KEY also its imported recipe."""
        await self._connection.request("DELETE", "environments", name)

    # -- checkouts

    def checkout(
        self,
        instance: str | None = None,
        *,
        mirror: str | None = None,
        commit: str | None = None,
        dataset: str | None = None,
        history: model.History | None = None,
        view: model.View = model.View.AGENT,
        backend: model.Backend | None = None,
        objects: model.ObjectSource | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: model.Bind = model.Bind.LEASE,
        attach: bool = False,
        sandbox: bool = False,
        layer: str | None = None,
        environment: str | None = None,
        label: str | None = None,
        auto_renew: bool = True,
    ) -> Pending[AsyncCheckout]:
        """Lease a tree at an instance's base commit, at NAME@COMMITISH, or at `commit` of `mirror`.

        `dataset` is that of the instance, if several record its id differently. `ttl` is the length
        of the lease: a timedelta, seconds, or a duration such as "30m". With `auto_renew` this
        client renews the lease until the handle is released or garbage collected. `owner` is the
        uid that owns the tree. With `bind` "process" the lease ends with this process. `attach`
        makes a checkout for `AsyncCheckout.attach`, even if this mount namespace does not show its
        path; `sandbox` makes one for commands in sandboxes, where the path need not be shown.
        `objects` "private" copies the objects of a pool tree, for a reader in another container.
        `layer` is a prepared layer to start with. `environment` is KEY, KEY@DIGEST, or "auto" for
        that of the instance. `label`, by default MIRRORD_LABEL, is a word by which `list_checkouts`
        finds the checkout, its forks and its grades.

        Example:
            async with mirrord.checkout("psf__requests-2317", ttl="30m", label="run-7") as checkout:
                print(checkout.path, checkout.expires_at)
        """
        members: dict[str, Any] = {"instance": instance, "mirror": mirror, "commit": commit}
        members |= {"dataset": dataset, "history": history, "view": view, "backend": backend}
        members |= {"ttl": http.seconds_of(ttl), "owner": owner, "bind": bind, "attach": attach}
        members |= {"sandbox": sandbox, "objects": objects}
        members |= {"layer": layer, "environment": environment, "label": http.label_of(label)}
        request = {
            "body": http.message(protocol.StartCheckout, **members),
            "auto_renew": auto_renew,
        }
        return Pending(self._lease(AsyncCheckout, protocol.Checkout, "checkouts", **request))

    async def _lease(
        self, handle: type[H], kind: type[protocol.Checkout], *path: str, **request: Any
    ) -> H:
        auto_renew = request.pop("auto_renew")
        ttl = request["body"].ttl if "body" in request else request["ttl"]
        return self._held(handle(self, await self._post(kind, *path, **request), ttl), auto_renew)

    def _held(self, handle: H, auto_renew: bool) -> H:
        if auto_renew:
            self._renewal.hold(handle)
        return handle

    def fork_checkout(
        self,
        checkout: str,
        *,
        snapshot: str | None = None,
        ttl: timedelta | float | str | None = None,
        bind: model.Bind = model.Bind.LEASE,
        auto_renew: bool = True,
    ) -> Pending[AsyncCheckout]:
        """Lease a copy of a checkout or of one of its snapshots.

        `lease.copied` of the fork says what was copied. The rest is as for `checkout`.

        Example:
            async with mirrord.fork_checkout("x3vtrlbeai6obdz2", snapshot="s1") as fork:
                print(fork.path)
        """
        kind = protocol.ForkCheckout
        body = http.message(kind, snapshot=snapshot, ttl=http.seconds_of(ttl), bind=bind)
        request = {"body": body, "auto_renew": auto_renew}
        path = ("checkouts", checkout, "fork")
        return Pending(self._lease(AsyncCheckout, protocol.Fork, *path, **request))

    async def make_snapshot(self, checkout: str, name: str | None = None) -> protocol.Snapshot:
        """Save the content of a checkout under a name, by default s1, s2 and so on."""
        body = http.message(protocol.MakeSnapshot, name=name)
        return await self._post(protocol.Snapshot, "checkouts", checkout, "snapshots", body=body)

    async def list_snapshots(self, checkout: str) -> list[protocol.Snapshot]:
        """Return the snapshots of a checkout, oldest first."""
        return await self._list(protocol.Snapshot, "checkouts", checkout, "snapshots")

    async def remove_snapshot(self, checkout: str, name: str) -> None:
        """Remove a snapshot of a checkout; forks of it stay."""
        await self._connection.request("DELETE", "checkouts", checkout, "snapshots", name)

    async def save_layer(self, checkout: str, name: str) -> protocol.PreparedLayer:
        """Save the changes of a checkout as a prepared layer for others of its commit."""
        body = http.message(protocol.SaveLayer, name=name)
        return await self._post(protocol.PreparedLayer, "checkouts", checkout, "layers", body=body)

    async def list_layers(self, mirror: str | None = None) -> list[protocol.PreparedLayer]:
        """Return the prepared layers that the caller may use; for administrators all."""
        return await self._list(protocol.PreparedLayer, "layers", mirror=mirror)

    async def remove_layer(self, layer: str) -> None:
        """Remove a prepared layer, by its id; raises ConflictError if a checkout has it."""
        await self._connection.request("DELETE", "layers", layer)

    async def open_checkout(self, checkout: str, *, auto_renew: bool = False) -> AsyncCheckout:
        """Return a handle of a held checkout, by its id; another client may renew it.

        Example:
            checkout = await mirrord.open_checkout("x3vtrlbeai6obdz2", auto_renew=True)
        """
        lease = await self.get_checkout(checkout)
        return self._held(AsyncCheckout(self, lease, None), auto_renew)

    async def list_checkouts(self, label: str | None = None) -> list[protocol.Checkout]:
        """Return the caller's checkouts, for administrators all; `label` selects those with it.

        Example:
            for lease in await mirrord.list_checkouts("run-7"):
                await mirrord.release_checkout(lease.id)
        """
        return await self._list(protocol.Checkout, "checkouts", label=label)

    async def get_checkout(self, checkout: str) -> protocol.Checkout:
        """Return the lease of a checkout."""
        return await self._get(protocol.Checkout, "checkouts", checkout)

    async def reset_checkout(
        self,
        checkout: str,
        instance: str | None = None,
        *,
        commit: str | None = None,
        dataset: str | None = None,
        to: str | None = None,
        layer: str | None = None,
        environment: str | None = None,
    ) -> protocol.ResetAnswer:
        """Reset a checkout, or move it to another instance or commit, or back `to` a snapshot."""
        target = {"instance": instance, "commit": commit, "dataset": dataset, "to": to}
        body = http.message(protocol.ResetCheckout, **target, layer=layer, environment=environment)
        return await self._post(protocol.ResetAnswer, "checkouts", checkout, "reset", body=body)

    async def renew_checkout(
        self, checkout: str, ttl: timedelta | float | str | None = None
    ) -> protocol.Checkout:
        """Renew the lease of a checkout for `ttl`; returns it with its new deadline."""
        body = http.message(protocol.RenewCheckout, ttl=http.seconds_of(ttl))
        lease = await self._post(protocol.Checkout, "checkouts", checkout, "renew", body=body)
        self._renewal.move(lease.id, lease.expires_at)
        return lease

    async def diff_checkout(
        self,
        checkout: str,
        *,
        format: model.DiffFormat = model.DiffFormat.PATCH,  # noqa: A002
        note: Callable[[str], object] = str,
    ) -> bytes:
        """Return the changes; `note` is called with what no patch records, a sentence each."""
        path = ("checkouts", checkout, "diff")
        answer = await self._connection.request("GET", *path, format=format)
        for sentence in json.loads(answer.head.headers.get("x-mirrord-diff-notes", "[]")):
            note(sentence)
        return answer.body

    async def apply_patch(
        self,
        checkout: str,
        patch: bytes | str,
        *,
        reverse: bool = False,
        strategy: model.ApplyStrategy | None = None,
    ) -> protocol.ApplyAnswer:
        """Apply a patch, or `@test_patch` or `@patch` of the instance.

        By default a patch applies exactly, one of the instance tolerantly.
        """
        named = patch if isinstance(patch, str) and patch.startswith("@") else None
        query: dict[str, Any] = {"reverse": reverse, "named": named, "strategy": strategy}
        query["content"] = None if named else http.patch_bytes(patch)
        return await self._post(protocol.ApplyAnswer, "checkouts", checkout, "apply", **query)

    async def restore_paths(self, checkout: str, commit: str, *paths: str) -> list[str]:
        """Restore files of a pinned commit in a checkout (grader view); returns their paths."""
        body = http.message(protocol.RestorePaths, commit=commit, paths=list(paths))
        path = ("checkouts", checkout, "restore")
        return (await self._post(protocol.RestoreAnswer, *path, body=body)).paths

    async def get_seal(self, checkout: str) -> protocol.SealReport:
        """Verify the seal of a checkout; for administrators."""
        return await self._get(protocol.SealReport, "checkouts", checkout, "seal")

    async def get_receipt(self, checkout: str) -> protocol.Receipt:
        """Return the receipt of a checkout's state; keep its `canonical()` bytes."""
        return await self._get(protocol.Receipt, "checkouts", checkout, "receipt")

    async def verify_receipt(self, receipt: protocol.Receipt) -> protocol.ReceiptReport:
        """Compare a receipt with its mirror and the daemon's record of it.

        The signature is not verified. A receipt is proven only if `proven_by` says by what.

        Example:
            report = await mirrord.verify_receipt(await checkout.receipt())
            print(report.holds, report.proven_by)
        """
        import hashlib  # noqa: PLC0415  (loads OpenSSL: 4 ms)

        digest = hashlib.sha256(receipt.signed_bytes()).hexdigest()
        plain = replace(receipt, grade=None, signature=None)  # a grade may be long
        return await self._post(
            protocol.ReceiptReport, "receipts", "verify", body=plain, sha256=digest
        )

    def grade(
        self,
        instance: str,
        patch: bytes | str,
        *,
        dataset: str | None = None,
        strategy: model.ApplyStrategy | str = model.ApplyStrategy.TOLERANT,
        policy: model.Policy | str | Mapping[str, str] | None = None,
        history: model.History | None = None,
        backend: model.Backend | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: model.Bind = model.Bind.LEASE,
        attach: bool = False,
        sandbox: bool = False,
        layer: str | None = None,
        environment: str | None = None,
        label: str | None = None,
        auto_renew: bool = True,
    ) -> Pending[AsyncGrade]:
        """Lease a tree with a patch for an instance, or NAME@COMMITISH, and the instance's tests.

        `policy` is "report", "drop" or "refuse", or one for each kind of rule: {"tests": "drop"}.
        With `strategy` "exact" the patch must apply as `git apply` does, else as SWE-bench's own
        commands do. The rest is as for `checkout`. Raises PatchConflictError, SteeringRefusedError.

        Example:
            patch = Path("fix.patch").read_bytes()
            async with mirrord.grade("psf__requests-2317", patch, policy="drop") as grade:
                print(grade.path, grade.dropped)
        """
        query: dict[str, Any] = {"instance": instance, "dataset": dataset, "history": history}
        query |= {"strategy": str(strategy), "policy": http.policy_text(policy), "backend": backend}
        query |= {
            "ttl": http.seconds_of(ttl),
            "owner": owner,
            "bind": str(bind),
            "attach": attach,
            "sandbox": sandbox,
        }
        query |= {"layer": layer, "environment": environment, "label": http.label_of(label)}
        request = {"content": http.patch_bytes(patch), "auto_renew": auto_renew}
        return Pending(self._lease(AsyncGrade, protocol.Grade, "grades", **query, **request))

    def grade_checkout(
        self,
        checkout: str,
        *,
        dataset: str | None = None,
        policy: model.Policy | str | Mapping[str, str] | None = None,
        backend: model.Backend | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: model.Bind = model.Bind.LEASE,
        attach: bool = False,
        sandbox: bool = False,
        auto_renew: bool = True,
    ) -> Pending[AsyncGrade]:
        """Lease a tree with the changes of a checkout and the instance's tests; see `grade`."""
        members = {"policy": http.policy_text(policy), "backend": backend, "owner": owner}
        members |= {"attach": attach, "sandbox": sandbox, "dataset": dataset}
        body = http.message(protocol.StartGrade, **members, ttl=http.seconds_of(ttl), bind=bind)
        request = {"body": body, "auto_renew": auto_renew}
        path = ("checkouts", checkout, "grade")
        return Pending(self._lease(AsyncGrade, protocol.Grade, *path, **request))

    async def attach_checkout(
        self,
        checkout: str,
        path: Path | str,
        *,
        target: model.Target = model.Target.TREE,
        pid: int | None = None,
        read_only: bool = False,
    ) -> None:
        """Attach a checkout's tree, its environment, or the directory of both to a directory.

        The mount follows resets, ends with the mount namespace, and replaces a checkout that is
        attached there. With `pid`, for root only, `path` is in the namespace of that process. With
        `read_only` it does not follow resets.
        """
        from .. import mounts  # noqa: PLC0415 - ctypes, which the command line seldom needs

        body = http.message(protocol.AttachCheckout, target=target)
        while True:
            descriptors: list[int] = []
            try:
                request = {"body": body, "descriptors": descriptors}
                answer = await self._post(
                    protocol.Attachment, "checkouts", checkout, "attach", **request
                )
                mounts.attach(descriptors[0], Path(path), pid, read_only=read_only)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            # a reset before it was attached did not reach the mount: attach it again
            if (await self.get_checkout(checkout)).resets == answer.resets:
                return

    async def open_mount(
        self, checkout: str, *, target: model.Target = model.Target.DIRECTORY
    ) -> int:
        """Return the descriptor of a detached mount of a checkout; the caller closes it."""
        body, descriptors = http.message(protocol.AttachCheckout, target=target), list[int]()
        request = {"body": body, "descriptors": descriptors}
        await self._post(protocol.Attachment, "checkouts", checkout, "attach", **request)
        return descriptors[0]

    async def release_checkout(self, checkout: str) -> None:
        """Release a checkout by its id; raises CheckoutNotFoundError if it is gone."""
        # before the request: the renewal of a lease that is gone would be logged as a failure
        self._renewal.drop(checkout)
        await self._connection.request("DELETE", "checkouts", checkout)

    async def turn(
        self,
        endings: Iterable[AsyncEnding] = (),
        checkouts: Iterable[str | protocol.StartCheckout] = (),
        *,
        label: str | None = None,
        auto_renew: bool = True,
    ) -> AsyncBatch:
        """End turns, then make checkouts, all in one request; up to 64 of each.

        `endings` are made by `AsyncCheckout.ending`. `checkouts` are ids of instances, or messages
        of `mirrord.protocol`. What fails is in the answer, and raises nothing.

        Example:
            endings = [checkout.ending(diff=True, release=True)]
            batch = await mirrord.turn(endings, ["psf__requests-863"])
            print(batch.turns[0].diff, batch.checkouts[0])
        """
        asked = list(endings)
        starts = [start_of(wanted, http.label_of(label)) for wanted in checkouts]
        gone = [ending.checkout for ending in asked if ending.request.release]
        # as for a release; those that the daemon did not release are renewed again below
        renewed = [checkout for checkout in gone if self._renewal.drop(checkout.id)]
        body = protocol.TakeTurns(turns=[ending.request for ending in asked], checkouts=starts)
        released: set[str] = set()
        try:
            answer = await self._post(protocol.TurnsAnswer, "turns", body=body)
            released = {turn.checkout for turn in answer.turns if turn.released}
        finally:
            for checkout in renewed:
                if checkout.id not in released:
                    self._renewal.hold(checkout)
        turns = []
        for ending, done in zip(asked, answer.turns, strict=True):
            ending.checkout.lease = done.reset or ending.checkout.lease
            grade = None
            if done.grade and ending.request.grade:
                ttl = ending.request.grade.ttl
                grade = self._held(AsyncGrade(self, done.grade, ttl), auto_renew)
            turns.append(AsyncFinished.of(done, grade))
        made = [
            self._held(AsyncCheckout(self, done.checkout, start.ttl), auto_renew)
            if done.checkout
            else errors.from_problem(done.problem.to_json() if done.problem else {})
            for start, done in zip(starts, answer.checkouts, strict=True)
        ]
        return AsyncBatch(turns, made)

    async def rehearsal(
        self,
        *instances: str,
        dataset: str | None = None,
        run: bool = False,
        logs: Path | None = None,
        test_timeout: timedelta = timedelta(minutes=30),
        owner: int | None = None,
        times: int = 1,
        parsers: Path | None = None,
    ) -> "AsyncRehearsal":
        """Prepare a rehearsal of these instances, all of a dataset, or all; for administrators.

        With `run` it builds their environments and runs their tests, each run for at most
        `test_timeout`, `times` times; logs go to the directory `logs`. The checkouts are those of
        `owner`, as whom the tests run. `parsers` is a file of Python with parsers of logs.

        Example:
            rehearsal = await mirrord.rehearsal("psf__requests-2317", run=True)
        """
        from .rehearsal import AsyncRehearsal  # noqa: PLC0415  (loads the parsers of logs)

        choices: dict[str, Any] = {"run": run, "logs": logs, "owner": owner, "times": times}
        choices["parsers"] = parsers
        rehearsal = AsyncRehearsal(self, test_timeout=test_timeout, **choices)
        await rehearsal.prepare(instances, dataset)
        return rehearsal

    # -- operations and events

    async def list_operations(self) -> list[protocol.Operation]:
        """Return your operations, newest first; for administrators all."""
        return await self._list(protocol.Operation, "operations")

    async def get_operation(self, operation: str) -> protocol.Operation:
        """Return an operation, by its id."""
        return await self._get(protocol.Operation, "operations", operation)

    async def cancel_operation(self, operation: str) -> protocol.Operation:
        """Cancel an operation; what is finished of it stays."""
        response = await self._connection.request("DELETE", "operations", operation)
        return http.read_one(response, protocol.Operation)

    async def wait(
        self,
        operation: protocol.Operation | str,
        *,
        progress: Callable[[protocol.Operation], None] | None = None,
        timeout: timedelta | float | None = None,
    ) -> protocol.Operation:
        """Wait for an operation and return it; raises the error of a failed one.

        Raises CancelledError if it was cancelled or the daemon restarted, DeadlineError after
        `timeout`, a timedelta or seconds. `progress` is called with the operation at each poll.

        Example:
            operation = await mirrord.sync_mirror("psf/requests")
            await mirrord.wait(operation, timeout=600, progress=lambda now: print(now.progress))
        """
        is_known = not isinstance(operation, str)
        identity = operation if isinstance(operation, str) else operation.id
        deadline = None if timeout is None else time.monotonic() + in_seconds(timeout)
        pauses = http.retry_pauses(_POLL_SECONDS)
        while True:
            try:
                current = await self.get_operation(identity)
            except errors.NotFoundError as error:
                if not is_known:
                    raise
                raise errors.CancelledError(
                    f"cannot finish operation {identity}: the daemon was restarted while it ran",
                    hint="start it again",
                    operation=identity,
                ) from error
            is_known = True
            if progress:
                progress(current)
            if current.state != "running":
                break
            if deadline is not None and time.monotonic() > deadline:
                raise errors.DeadlineError(
                    f"cannot wait longer for operation {identity}: it is still running",
                    hint="wait again",
                )
            await async_pause(next(pauses, _POLL_SECONDS))
        if current.error is not None:
            raise errors.from_problem(current.error.to_json())
        if current.state == "cancelled":
            fact = f"cannot finish {current.kind} of {current.subject}: it was cancelled"
            raise errors.CancelledError(fact, operation=current.id)
        return current

    async def events(
        self, *, after: str | None = None, follow: bool = True
    ) -> AsyncGenerator[protocol.Event]:
        """Yield events as they happen, through restarts of the daemon.

        Starts after the event `after` (BOOT:ID or ID), by default now. With `follow=False` it ends
        after the events that the daemon remembers.

        Example:
            async for event in mirrord.events():
                print(event.at, event.name, event.fields)
        """
        last = after
        pauses = http.retry_pauses(self._patience_seconds)
        while True:
            reader, headers = http.EventReader(), {"accept": "text/event-stream"}
            headers |= {"last-event-id": last} if last else {}
            stream = self._connection.stream("events", headers=headers, follow=follow)
            try:
                async with stream as (_, body):
                    async for piece in body:
                        for event in reader.feed(piece):
                            # the patience is for one restart, not for all of them together
                            pauses = http.retry_pauses(self._patience_seconds)
                            last = f"{event.boot}:{event.id}"
                            yield event
                if not follow:
                    return
            except errors.NoDaemonError:
                # without a last event, those of the meantime could not be asked for
                if last is None or not follow:
                    raise
            if (seconds := next(pauses, None)) is None:
                fact = f"cannot follow events: the daemon at {self.socket} stopped"
                raise errors.NoDaemonError(fact, hint="see its log")
            await async_pause(seconds)


def _mirror(name: str) -> str:
    """Return a mirror's name as one segment of a path; the daemon validates it."""
    return name.replace("/", "__", 1)


def _upload(path: Path, progress: ReportProgress | None) -> AsyncIterator[bytes]:
    """Yield a file in pieces; `progress` counts the bytes that were sent."""
    return async_pieces(http.iter_file(path), _counted(path.stat().st_size, progress))


def _counted(total: int | None, progress: ReportProgress | None) -> Callable[[int], None]:
    def sent(done: int) -> None:
        if progress:
            progress(protocol.Progress(done=done, total=total, unit="bytes"))

    return sent
