"""`mirrord environment …`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from ...client.archives import is_image
from ...errors import UsageError
from ...model import shown
from ...protocol import BuildReport, Environment
from ..output import count, facts_of, listing, short, size
from ..session import Argument, NoWait, Option, Session, read_jobs
from ..waiting import conclude, exit_as, watching

_NAME_HELP = "KEY, or KEY@ and the first digits of the digest."
Name = Annotated[str, Argument(_NAME_HELP, "KEY", "environment")]
_NAMES_HELP = "Instances, or keys of imported recipes and earlier builds."


def build(
    session: Session,
    names: Annotated[list[str], Argument(_NAMES_HELP, "[NAME]...")] = [],  # noqa: B006
    dataset: Annotated[
        str | None,
        Option("All instances of this dataset, or the dataset of NAME.", "NAME", names="dataset"),
    ] = None,
    prewarm: Annotated[bool, Option("Also prepare each instance of the dataset.")] = False,
    again: Annotated[bool, Option("Retry failed builds.")] = False,
    frozen: Annotated[bool, Option("Use no package released after the instance's date.")] = False,
    images: Annotated[bool, Option("Import the images that the rows name.")] = False,
    image_name: Annotated[
        str | None, Option("How images are named, with {image} or {id}.", "TEMPLATE")
    ] = None,
    jobs: Annotated[str, Option("Images to import at a time.", "N")] = "4",
    no_wait: NoWait = False,
) -> None:
    """Only missing environments are built. A named instance is also prepared: the install command
    of its recipe runs, and its changes become the prepared layer of checkouts with the environment.

    A failed build is a finding (status 8). It is retried when its recipe, the interpreter or the
    settings change, or with --again.
    """
    if not names and dataset is None:
        raise UsageError("cannot build: nothing is named", hint="name instances, or add --dataset")
    operation = session.client.build_environments(
        *names, dataset=dataset, prewarm=prewarm, again=again, frozen=frozen,
        images=images or image_name is not None, image_name=image_name, jobs=read_jobs(jobs),
    )  # fmt: skip
    report = conclude(session, operation, no_wait, BuildReport, _build_lines)
    for failure in report.failed if report else ():
        session.note(failure.detail)
    exit_as(report)


def _build_lines(report: BuildReport) -> Iterator[str]:
    yield from report.ready
    if report.prepared:
        yield f"prepared {count(len(report.prepared), 'commit')}"


def add(
    session: Session,
    source: Annotated[
        str, Argument("TOML file with [[environment]] tables, or an image.", "FILE|IMAGE", "file")
    ],
    key: Annotated[str | None, Option("Name of an image's environment.", "KEY")] = None,
    tree: Annotated[
        str | None, Option("Where the image has its repository; default: as found.", "PATH")
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """An imported recipe takes precedence over that of rows with the same key.

    An IMAGE is docker://REPOSITORY:TAG, which the daemon fetches, docker-archive:FILE,
    oci-archive:FILE, oci:DIRECTORY[:TAG] or dir:ROOTFS. Checkouts with its environment show the
    sealed tree in place of its repository. What cannot be used of it is a finding (status 8).
    """
    if is_image(source):
        try:
            with watching(session, f"sending {source}") as watch:
                operation = session.client.import_image(source, key=key, tree=tree, progress=watch)
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror}") from error
        done = conclude(session, operation, no_wait, BuildReport, _build_lines)
        for failure in done.failed if done else ():
            session.note(failure.detail)
        exit_as(done)
        return
    if key or tree:
        hint = "name a recipe's key in its file"
        raise UsageError("cannot use --key and --tree with a file of recipes", hint=hint)
    file = Path(source)
    try:
        recipes = session.client.import_recipes(file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    session.answer(recipes, (recipe.key for recipe in recipes))


def list_all(session: Session) -> None:
    environments = session.client.list_environments()
    columns = "ENVIRONMENT=name STATE PYTHON FILES SIZE=size_bytes HELD=holders BUILT=built_at"
    session.answer(environments, listing(environments, columns))


def show(session: Session, key: Name) -> None:
    """With --json, the recipe is included."""
    environment = session.client.get_environment(key)
    session.answer(environment, _environment_lines(environment))


_SHOWN = 20  # of the findings of a scan; --json has more


def _environment_lines(environment: Environment) -> Iterator[str]:
    built_from = (
        f"{environment.mirror}@{short(environment.commit)}"
        if environment.mirror and environment.commit
        else None
    )
    names = "environment=name state source python interpreter built_at built=built_at used=used_at"
    names += " held=holders files size manifest left_out findings error"
    shared = f"{size(environment.size_bytes)}, {size(environment.shared_bytes)} of it shared"
    left_out = (
        ", ".join(f"{times} {reason}" for reason, times in environment.dropped.items()) or None
    )
    counts = [len(layer.findings) for layer in environment.prepared] + [
        scan.count for scan in environment.scans
    ]
    leaks = len(environment.findings) + sum(counts) or None
    own: dict[str, object] = {"built_at": built_from, "left_out": left_out, "findings": leaks}
    own |= {"size": shared} if environment.state == "ready" else dict.fromkeys(("files", "size"))
    yield from facts_of(environment, names, **own)
    if environment.prepared:
        yield ""
        yield from listing(environment.prepared, "MIRROR COMMIT=commit:short LAYER ERROR")
    if environment.scans:
        yield ""
        yield from listing(
            environment.scans, "MIRROR COMMIT=commit:short FINDINGS=count SCANNED=at"
        )
        for scan in environment.scans:
            yield from (
                f"{leak['kind']} {shown(leak['path'], 200)}: {leak['detail']}"
                for leak in scan.findings[:_SHOWN]
            )
    if environment.tail:
        yield ""
        yield from environment.tail


def log(
    session: Session,
    key: Name,
    follow: Annotated[bool, Option("Print new lines until the build ends.")] = False,
) -> None:
    """The log also has the preparations of instances after the build."""
    for piece in session.client.environment_log(key, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def remove(
    session: Session, keys: Annotated[list[str], Argument(_NAME_HELP, "KEY...", "environment")]
) -> None:
    """A KEY without digest removes all its builds and its imported recipe."""
    session.each(keys, session.client.remove_environment)
