"""One aggregator of a group: a process under a name, and what its log says of it."""

from __future__ import annotations

from tests.harness.processes import CommandProcess, Line

CUT_OFF = "the brokers answer another client"
"""What a process says that ends since a client of its has lost the brokers (`kafka_watch`)."""
FENCED = ("fenced", "transaction")
"""What a process says that may not go on with its transactions."""


class Member:
    """One aggregator, under a name that it keeps over restarts."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        """Start nothing yet."""
        self.name = name
        self._environment = {**environment, "AGGREGATOR_INSTANCE_NAME": name}
        self.process: CommandProcess | None = None
        self.seen = 0
        """Lines of its log that were looked at."""
        self.excused = False
        """What it is through explains that it loses its partitions."""
        self.frozen = False

    def start(self) -> None:
        """Start it; it joins the group when it is ready."""
        self.process = CommandProcess(
            "aggregator", "run", environment=self._environment, forget=("claim",)
        )
        self.seen = 0
        self.excused = self.frozen = False

    @property
    def lines(self) -> list[Line]:
        """What it has logged since it was started."""
        return [] if self.process is None else list(self.process.lines)

    @property
    def pid(self) -> int:
        """Of the process, 0: none runs."""
        running = self.process is not None and self.process.running
        return self.process.process.pid if running and self.process is not None else 0

    def owned(self) -> set[str]:
        """The partitions that it says it has."""
        owned: set[str] = set()
        if not self.pid:
            return owned
        for line in self.lines:
            match line.get("event"):
                case "partitions assigned":
                    owned |= set(line["partitions"])
                case "partitions revoked" | "partitions lost":
                    owned -= set(line["partitions"])
        return owned

    @property
    def last_words(self) -> str:
        """Its status and why it stopped."""
        status = None if self.process is None else self.process.process.returncode
        reasons = [line.get("reason") for line in self.lines if line.get("event") == "stopped"]
        return f"status {status}, {reasons[-1] if reasons else 'without a word'}"

    @property
    def was_fenced(self) -> bool:
        """Whether it ended because the brokers had given its transaction up, as it must."""
        return any(word in self.last_words for word in FENCED)

    @property
    def was_cut_off(self) -> bool:
        """Whether it ended because its client could not find the brokers again, as it must."""
        return CUT_OFF in self.last_words

    @property
    def found_no_broker(self) -> bool:
        """Whether it ended because no broker answered at its start, as it must."""
        return any("no Kafka broker answers" in str(line.get("text")) for line in self.lines)

    def end(self) -> None:
        """SIGKILL and no more of it."""
        if self.process is not None:
            with self.process:
                pass
            self.process = None
