"""The handler of turns: all that ends an agent's turn in a checkout, and for many at once."""

import asyncio
from base64 import b64encode
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from .. import protocol
from ..checkouts.patching import DiffAnswer
from ..errors import AccessError, CheckoutNotFoundError, MirrordError, TooLargeError
from ..host.peers import Role
from ..patches.diff import must_be_short
from ..telemetry import log
from .checkouts import bound_process
from .request import Call, error_of

T = TypeVar("T")


async def take_turns(call: Call, body: protocol.TakeTurns) -> protocol.TurnsAnswer:
    """End turns in checkouts, then make checkouts; each answer has what was done, or its problem.

    What it leased is released if the client hangs up before it reads the answer.
    """
    leased: list[str] = []
    turns = await _all(call, (_Ending(call, turn, leased).take() for turn in body.turns))
    checkouts = await _all(call, (_start(call, start, leased) for start in body.checkouts))

    async def release() -> None:
        for checkout in leased:
            with suppress(CheckoutNotFoundError):
                await call.engine.checkouts.release(checkout, call.peer)
                log.info("checkout.abandoned", checkout=checkout, uid=call.peer.uid)

    if call.connection.is_lost:
        await release()
    elif leased:
        call.connection.undo_if_unread(release)
    return protocol.TurnsAnswer(turns=turns, checkouts=checkouts)


async def _all(call: Call, works: Any) -> list[Any]:
    """Run coroutines at once, each charged to the user as a request is."""
    gate, user = call.engine.gate, call.engine.access.user_of(call.peer.uid)

    async def metered(work: Coroutine[Any, Any, T]) -> T:
        return await gate.metered(user, work)

    return await asyncio.gather(*map(metered, works))


async def _start(
    call: Call, start: protocol.StartCheckout, leased: list[str]
) -> protocol.CheckoutAnswer:
    try:
        if call.role < Role.MEMBER:
            raise AccessError(
                "cannot start checkout: not allowed for this user",
                hint="only members of the group in [access] may",
            )
        process = bound_process(call, start.bind)
        made = await call.engine.checkouts.checkout(start, call.peer, process)
    except Exception as error:  # noqa: BLE001  # error_of logs bugs
        return protocol.CheckoutAnswer(problem=_problem(error))
    leased.append(made.id)
    return protocol.CheckoutAnswer(checkout=made)


class _Ending:
    """A turn and its answer, step by step."""

    def __init__(self, call: Call, turn: protocol.Turn, leased: list[str]) -> None:
        self._call, self._turn, self._leased = call, turn, leased
        self._done: dict[str, Any] = {}

    async def take(self) -> protocol.TurnAnswer:
        try:
            await self._take()
        except Exception as error:  # noqa: BLE001  # error_of logs bugs
            self._done["problem"] = _problem(error)
        return protocol.TurnAnswer(checkout=self._turn.checkout, **self._done)

    async def _take(self) -> None:
        turn, peer, checkouts = self._turn, self._call.peer, self._call.engine.checkouts
        if turn.grade:
            await self._grade(turn.grade)
        elif turn.diff:
            self._printed(await checkouts.diff(turn.checkout, peer, turn.diff))
        if turn.snapshot:
            made = await checkouts.snapshot(turn.checkout, turn.snapshot, peer)
            self._done["snapshot"] = made
        if turn.release:  # a tree that was reset would be gone with it
            await checkouts.release(turn.checkout, peer)
            self._done["released"] = True
        elif turn.reset:
            self._done["reset"] = await checkouts.reset(turn.checkout, turn.reset, peer)

    async def _grade(self, request: protocol.StartGrade) -> None:
        """Make the grade, and the diff with it; where there is no grade, the diff alone."""
        turn, call, grading = self._turn, self._call, self._call.engine.grading
        call.engine.checkouts.leasing.must_be_admin(call.peer, "grade a checkout")
        asked = turn.checkout, request, call.peer, bound_process(call, request.bind)
        if not turn.diff:
            self._graded(await grading.grade(*asked))
            return
        try:
            grade, diff = await grading.grade_and_diff(*asked, turn.diff)
        # printing the diff again would meet the same bound
        except TooLargeError:
            raise
        except MirrordError:
            self._printed(await call.engine.checkouts.diff(turn.checkout, call.peer, turn.diff))
            raise
        self._graded(grade)
        self._printed(diff)

    def _graded(self, grade: protocol.Grade) -> None:
        self._leased.append(grade.id)
        self._done["grade"] = grade

    def _printed(self, diff: DiffAnswer) -> None:
        # a file means too long, for which the next line raises
        if not isinstance(diff.content, bytes):
            diff.content.unlink()
        must_be_short(diff.content)
        assert isinstance(diff.content, bytes)
        text = b64encode(diff.content).decode("ascii")
        self._done |= {"diff": text, "diff_by": diff.made_by, "notes": list(diff.notes)}


def _problem(error: Exception) -> protocol.Problem:
    return protocol.Problem.from_json(error_of(error).problem())
