"""From the core's `CommitTransaction` to records that fit their topics, and what came of them.

Invariant: a transaction is handed on whole or not at all. Before anything is produced each record
is made and measured, since one that is refused would abort all its mates; if any doesn't fit, or
can't be made, the core hears of it at once and begins again with the next smaller forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.query import Query
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.headers import Headers
from aggregator.wire.result import ResultEncoder

if TYPE_CHECKING:
    from aggregator.telemetry.logs import Logger

Record = tuple[bytes | None, bytes | None, Headers]
"""(key, value, headers)."""
Outgoing = tuple[Query, Record, bool]
"""The last: in a produce batch with no other."""


class TransactionsPort(Protocol):
    """The transactional producer; no method emits an event before it returns."""

    def result_misfit(self, record: Record) -> str | None:
        """Why the results topic would refuse it; None: it fits."""

    def letter_misfit(self, record: Record) -> str | None:
        """The same of the dead letter topic."""

    def commit(
        self,
        commit_id: int,
        results: Sequence[Outgoing],
        letters: Sequence[Outgoing],
        offsets: Sequence[fx.CommitOffset],
    ) -> None:
        """Answered by `CommitDone` or `CommitFailed`."""

    def abort(self, commit_id: int) -> None:
        """Abort it unless its commit has begun."""


@dataclass(slots=True)
class _Misfits:
    """By message: results and letters that can't go as they are."""

    by_message: dict[str, tuple[list[Query], list[Query]]] = field(default_factory=dict)

    def add(self, message: str, query: Query, *, letter: bool = False) -> None:
        self.by_message.setdefault(message, ([], []))[letter].append(query)

    def events(self, commit_id: int) -> list[ev.Event]:
        """What the core is told of a transaction that was not begun over these."""
        failed: list[ev.Event] = [
            ev.WritesFailed(
                fault=ev.WriteFault.RECORD_ALONE, message=message, results=results, letters=letters
            )
            for message, (results, letters) in self.by_message.items()
        ]
        reason = next(iter(self.by_message))
        return [*failed, ev.CommitFailed(commit_id=commit_id, message=f"not begun: {reason}")]


class TransactionWriter:
    """Makes the records of each transaction; knows the one that is under way until it has ended."""

    def __init__(self, port: TransactionsPort, encoder: ResultEncoder, log: Logger) -> None:
        self._port = port
        self._encoder = encoder
        self._log = log
        self._under_way: fx.CommitTransaction | None = None
        self._began_ns = 0

    def begin(self, effect: fx.CommitTransaction, now_ns: int) -> list[ev.Event]:
        """Hand it on, or return the events that say why not."""
        misfits = _Misfits()
        results: list[Outgoing] = []
        for rows in effect.write.vectors:
            self._vectors(rows, results, misfits)
        for error in effect.write.errors:
            self._error(error, results, misfits)
        letters: list[Outgoing] = []
        for letter in effect.write.letters:
            self._letter(letter, letters, misfits)
        if misfits.by_message:
            return misfits.events(effect.commit_id)
        self._under_way = effect
        self._began_ns = now_ns
        self._port.commit(effect.commit_id, results, letters, effect.offsets)
        return []

    def abort(self, effect: fx.AbortTransaction) -> None:
        """Ask for its end."""
        self._port.abort(effect.commit_id)

    def ended(self, event: ev.CommitDone | ev.CommitFailed) -> tuple[fx.Write, int] | None:
        """Return what is durable by it, if anything, and when it began."""
        effect = self._under_way
        if effect is None or effect.commit_id != event.commit_id:
            return None
        self._under_way = None
        return (effect.write, self._began_ns) if isinstance(event, ev.CommitDone) else None

    def _vectors(self, rows: fx.VectorRows, results: list[Outgoing], misfits: _Misfits) -> None:
        encode, misfit_of = self._encoder.encode_vector, self._port.result_misfit
        for query, row in zip(rows.queries, rows.rows, strict=True):
            try:
                record = encode(
                    query,
                    rows.group,
                    row,
                    model_revision=rows.model_revision,
                    inference_us=rows.inference_us,
                    answered_ns=rows.answered_ns,
                )
            except Exception as error:  # noqa: BLE001 - never a reason to lose its mates
                misfits.add(self._not_made(error), query)
                continue
            misfit = misfit_of(record)
            if misfit is None:
                results.append((query, record, rows.alone))
            else:
                misfits.add(misfit, query)

    def _error(self, row: fx.ErrorRow, results: list[Outgoing], misfits: _Misfits) -> None:
        try:
            record = self._encoder.encode_error(row.query, row.form)
        except Exception as error:  # noqa: BLE001 - the core ends the process over the bare form
            misfits.add(self._not_made(error), row.query)
            return
        misfit = self._port.result_misfit(record)
        if misfit is None:
            results.append((row.query, record, row.alone))
        else:
            misfits.add(misfit, row.query)

    def _letter(self, row: fx.LetterRow, letters: list[Outgoing], misfits: _Misfits) -> None:
        try:
            record = encode_letter(row.query, row.form)
        except Exception as error:  # noqa: BLE001 - as with errors
            misfits.add(self._not_made(error), row.query, letter=True)
            return
        misfit = self._port.letter_misfit(record)
        if misfit is None:
            letters.append((row.query, record, row.alone))
        else:
            misfits.add(misfit, row.query, letter=True)

    def _not_made(self, error: Exception) -> str:
        message = f"not encoded: {type(error).__name__}: {error}"
        self._log.error("record not encoded", error=message)
        return message
