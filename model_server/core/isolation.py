"""Finding the input that makes a pass raise, without failing its mates and without blaming anyone
for a broken engine.

A pass that raised is halved; the halves run alone, one after the other, and are halved again when
they raise. An input that raises alone is a *suspect*: before it is blamed the canary text runs
alone on the same engine. Only a good canary convicts. It knows nothing of engines or requests'
contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model_server.core.effects import Part


def halved(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Two halves by number of inputs, in order; the first has the odd one less."""
    middle = sum(len(part.indexes) for part in parts) // 2
    first: list[Part] = []
    second: list[Part] = []
    for part in parts:
        size = len(part.indexes)
        take = min(size, middle)
        middle -= take
        if take:
            first.append(Part(request=part.request, indexes=part.indexes[:take]))
        if take < size:
            second.append(Part(request=part.request, indexes=part.indexes[take:]))
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An input that raised alone, and what was raised."""

    part: Part
    message: str
    out_of_memory: bool = False


class Isolation:
    """The halves still to run, and the suspect that waits for the canary."""

    def __init__(self) -> None:
        self._halves: list[Sequence[Part]] = []
        self._suspect: Suspect | None = None

    @property
    def suspect(self) -> Suspect | None:
        """Set: the next pass must be the canary's."""
        return self._suspect

    @property
    def busy(self) -> bool:
        """Whether anything is left to run."""
        return self._suspect is not None or bool(self._halves)

    def raised(
        self, parts: Sequence[Part], message: str, *, alone: bool, out_of_memory: bool = False
    ) -> None:
        """A pass raised; `parts` is what is left of it. `alone`: it had one input only.

        One that is left of several has not raised alone: it may be the mate of one that expired or
        was cancelled meanwhile.
        """
        if alone:
            self._suspect = Suspect(part=parts[0], message=message, out_of_memory=out_of_memory)
        elif sum(len(part.indexes) for part in parts) == 1:
            self._halves.append(parts)
        else:
            self.halve(parts)

    def halve(self, parts: Sequence[Part]) -> None:
        """Run these in two halves; at least two inputs."""
        first, second = halved(parts)
        self._halves += [second, first]

    def next_half(self) -> Sequence[Part] | None:
        """The half to run now, taken out; the one cut last comes first."""
        return self._halves.pop() if self._halves else None

    def parts(self) -> list[Part]:
        """Everything that was taken into a pass and is still to be decided."""
        parts = [part for half in self._halves for part in half]
        if self._suspect is not None:
            parts.append(self._suspect.part)
        return parts

    def convicted(self) -> Suspect:
        """The canary was good after the suspect: it is to blame.

        Raises:
            RuntimeError: there is no suspect.
        """
        if self._suspect is None:
            raise RuntimeError("a canary ran without a suspect")
        suspect, self._suspect = self._suspect, None
        return suspect

    def clear(self) -> None:
        """The engine is gone; everything held is answered elsewhere."""
        self._halves.clear()
        self._suspect = None
