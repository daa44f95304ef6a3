"""The faults that strike the world at instants of their own: one method for each step of the table.

It draws when and what from the seed's doses, and puts everything right when it is told to heal. It
must not know what follows from what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.broker import LETTERS, RESULTS
from tests.sim.kernel import MS, SECOND
from tests.sim.network import Connection
from tests.sim.servers import ModelServer

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.simulation import Simulation

PROCESSES_MAX = 4


class Monkey:
    """See the module's docstring."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._kernel = world.kernel
        self._do: dict[str, Callable[[], bool]] = {
            "process killed": self._kill,
            "process stopped by SIGTERM": self._stop,
            "process replaced in a rolling restart": self._roll,
            "process added": self._add,
            "process frozen": self._freeze_short,
            "process frozen past its session": self._freeze_long,
            "event loop blocked": self._block_short,
            "event loop blocked past max.poll.interval": self._block_long,
            "monotonic clock stood still, then leapt": self._hold_clock,
            "wall clock jumped": self._wall_jump,
            "partitions shuffled": self._shuffle,
            "member lost": self._lose_member,
            "cluster down": self._cluster_down,
            "results topic down": lambda: self._topic_down(RESULTS, 3 * SECOND),
            "results topic down past sink_outage_ms_max": self._outage,
            "dead letter topic down": lambda: self._topic_down(LETTERS, 3 * SECOND),
            "results topic not authorised": self._refuse_results,
            "records deleted by retention": self._retention,
            "server killed": self._kill_server,
            "server drained": self._drain_server,
            "server's engine died": self._kill_engine,
            "server's limits changed": self._change_limits,
            "server's address gone": self._address_gone,
            "server frozen": self._freeze_server,
            "server's revision changed": self._change_revision,
            "stream broken": self._break_stream,
            "stream stalled": self._stall_stream,
        }

    def start(self) -> None:
        self._next()

    def _next(self) -> None:
        every_ns = self._world.doses.step_every_ns
        delay_ns = int(self._kernel.rng.expovariate(1.0) * every_ns)
        self._kernel.after(delay_ns, None, "monkey", self._step)

    def _step(self) -> None:
        world = self._world
        if world.healing:
            return
        steps = world.doses.steps
        if steps:
            name = self._kernel.rng.choices(list(steps), list(steps.values()))[0]
            if self._do[name]():
                self._kernel.fire(name)
                self._kernel.say(name)
        self._next()

    # Processes -----------------------------------------------------------------------------------

    def _process(self) -> Process | None:
        living = self._world.living()
        return self._kernel.rng.choice(living) if living else None

    def _kill(self) -> bool:
        process = self._process()
        if process is None:
            return False
        self._world.checks.killed(process)
        process.kill()
        return True

    def _stop(self) -> bool:
        process = self._process()
        if process is None or process.stopping:
            return False
        process.stop()
        return True

    def _roll(self) -> bool:
        """Its successor starts, and joins about when it drains."""
        process = self._process()
        if process is None or process.stopping or process.leaves:
            return False
        process.leaves = True
        kernel = self._kernel
        kernel.after(kernel.delay_ns(0, 200 * MS), None, "start", self._world.start_process)
        kernel.after(kernel.delay_ns(0, 400 * MS), None, "SIGTERM", process.stop)
        return True

    def _add(self) -> bool:
        if len(self._world.living()) >= PROCESSES_MAX:
            return False
        self._world.start_process()
        return True

    def _freeze(self, ns: int) -> bool:
        process = self._process()
        if process is None:
            return False
        kernel = self._kernel
        self._world.checks.stalled(process)
        process.owner.freeze(kernel.now_ns + ns)
        session_ns = process.options.session_timeout_ms * MS
        member = process.consumer.member
        if ns > session_ns and member is not None:
            group = self._world.broker.group
            kernel.after(session_ns, None, "session ends", lambda: group.leave(member))
            heard_ns = ns + kernel.delay_ns(0, 300 * MS)
            consumer = process.consumer
            kernel.after(heard_ns, process.owner, "fenced", lambda: consumer.fence(member))
        return True

    def _freeze_short(self) -> bool:
        return self._freeze(self._kernel.delay_ns(MS, 400 * MS))

    def _freeze_long(self) -> bool:
        return self._freeze(self._kernel.delay_ns(1600 * MS, 6 * SECOND))

    def _block(self, ns: int) -> bool:
        process = self._process()
        if process is None:
            return False
        self._world.checks.stalled(process)
        process.loop.busy_until_ns = self._kernel.now_ns + ns
        return True

    def _block_short(self) -> bool:
        return self._block(self._kernel.delay_ns(MS, 2500 * MS))

    def _block_long(self) -> bool:
        process = self._process()
        if process is None:
            return False
        return self._block(int(1.6 * process.options.max_poll_interval_ms) * MS)

    def _hold_clock(self) -> bool:
        process = self._process()
        if process is None:
            return False
        self._world.checks.stalled(process)
        self._world.checks.clocks_jump = True
        process.owner.hold_clock(self._kernel.now_ns + self._kernel.delay_ns(MS, 3 * SECOND))
        return True

    def _wall_jump(self) -> bool:
        process = self._process()
        if process is None:
            return False
        self._world.checks.clocks_jump = True
        process.owner.wall_offset_ms = self._kernel.rng.choice([-(10**8), -5000, 0, 5000, 10**8])
        return True

    # Kafka ---------------------------------------------------------------------------------------

    def _shuffle(self) -> bool:
        group = self._world.broker.group
        if not group.members:
            return False
        group.rebalance(shuffle=True)
        return True

    def _lose_member(self) -> bool:
        """The coordinator gives a member up that lives, and that hears of it later."""
        group, kernel = self._world.broker.group, self._kernel
        if not group.members:
            return False
        member = kernel.rng.choice(group.members)
        group.leave(member)
        consumer = member.consumer
        heard_ns = kernel.delay_ns(MS, 500 * MS)
        kernel.after(heard_ns, consumer.owner, "fenced", lambda: consumer.fence(member))
        return True

    def _cluster_down(self) -> bool:
        self._world.broker.down_until_ns = self._kernel.now_ns + self._kernel.delay_ns(
            10 * MS, 2 * SECOND
        )
        return True

    def _topic_down(self, name: str, most_ns: int) -> bool:
        topic = self._world.broker.outputs[name]
        topic.down_until_ns = self._kernel.now_ns + self._kernel.delay_ns(10 * MS, most_ns)
        return True

    def _outage(self) -> bool:
        topic = self._world.broker.outputs[RESULTS]
        topic.down_until_ns = self._kernel.now_ns + 14 * SECOND
        return True

    def _refuse_results(self) -> bool:
        topic = self._world.broker.outputs[RESULTS]
        topic.refused_until_ns = self._kernel.now_ns + self._kernel.delay_ns(10 * MS, 2 * SECOND)
        return True

    def _retention(self) -> bool:
        world = self._world
        tp = self._kernel.rng.choice(world.broker.tps)
        log = world.broker.logs[tp]
        ahead = self._kernel.rng.choice([0, 5, 60])
        below = min(world.broker.committed.get(tp, 0) + ahead, log.end)
        if below <= log.start:
            return False
        log.delete_below(below)
        world.checks.deleted_below(tp, below)
        return True

    # Servers -------------------------------------------------------------------------------------

    def _server(self) -> ModelServer | None:
        up = [server for server in self._world.servers.values() if server.up]
        return self._kernel.rng.choice(up) if up else None

    def _kill_server(self) -> bool:
        server = self._server()
        if server is None:
            return False
        server.stop(restart_ns=self._kernel.delay_ns(10 * MS, 3 * SECOND))
        return True

    def _drain_server(self) -> bool:
        server = self._server()
        if server is None or not server.serving:
            return False
        server.drain()
        return True

    def _kill_engine(self) -> bool:
        server = self._server()
        if server is None or not server.serving:
            return False
        server.engine_dies("killed from outside")
        return True

    def _change_limits(self) -> bool:
        server = self._server()
        if server is None:
            return False
        server.change_limits()
        return True

    def _address_gone(self) -> bool:
        world, kernel = self._world, self._kernel
        if not world.found:
            return False
        address = kernel.rng.choice(list(world.found))
        server = world.found.pop(address)

        def back() -> None:
            world.found[address] = server

        kernel.after(kernel.delay_ns(600 * MS, 3 * SECOND), None, "address back", back)
        return True

    def _freeze_server(self) -> bool:
        server = self._server()
        if server is None:
            return False
        server.owner.freeze(self._kernel.now_ns + self._kernel.delay_ns(10 * MS, 9 * SECOND))
        return True

    def _change_revision(self) -> bool:
        """A rolling model change: it comes back with another one, and later with the first."""
        server = self._server()
        if server is None:
            return False
        server.revision = "r2" if server.revision == "r1" else "r1"
        server.stop(restart_ns=self._kernel.delay_ns(10 * MS, SECOND))
        return True

    def _connection(self) -> Connection | None:
        connections = [
            connection
            for server in self._world.servers.values()
            for connection in server.connections.values()
            if connection.open
        ]
        return self._kernel.rng.choice(connections) if connections else None

    def _break_stream(self) -> bool:
        connection = self._connection()
        if connection is None:
            return False
        connection.cut("connection reset")
        return True

    def _stall_stream(self) -> bool:
        connection = self._connection()
        if connection is None:
            return False
        connection.stalled_until_ns = self._kernel.now_ns + self._kernel.delay_ns(MS, 2 * SECOND)
        return True

    # Healing -------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Put everything right that time alone does not."""
        world, kernel = self._world, self._kernel
        now_ns = kernel.now_ns
        world.broker.down_until_ns = min(world.broker.down_until_ns, now_ns)
        for topic in world.broker.outputs.values():
            topic.down_until_ns = min(topic.down_until_ns, now_ns)
            topic.refused_until_ns = 0
        world.found = dict(world.servers)
        for server in world.servers.values():
            if server.revision != "r1":
                server.revision = "r1"
                server.stop(restart_ns=MS)
            elif not server.up:
                kernel.after(100 * MS, None, "server starts", server._restart)
            server.owner.frozen_until_ns = min(server.owner.frozen_until_ns, now_ns)
        self.restart_misled()

    def restart_misled(self) -> None:
        """Not pinned, the first revision that a process saw holds until it is restarted."""
        for process in self._world.living():
            if any(each.revision == "r2" for each in process.core.dispatchers.values()):
                process.stop()
