"""Convicting the one text that kills engines, and nobody else."""

from __future__ import annotations

from aggregator.core.backlog import NEVER_NS
from aggregator.core.suspects import Group, Suspects, judge
from tests.unit.dispatch_bench import MS, make_queries


def test_a_first_death_is_retried_as_any_other() -> None:
    queries = make_queries(4)
    verdict = judge(queries, None, alone=False, server="a", births=1)
    assert verdict.retry == queries
    assert verdict.groups == []
    assert verdict.convicted == []
    assert [query.attempts for query in queries] == [1] * 4


def test_after_a_second_death_they_are_suspects_together() -> None:
    queries = make_queries(4)
    for query in queries[:3]:
        query.deaths = 1
    verdict = judge(queries, None, alone=False, server="a", births=1)
    assert verdict.retry == queries[3:]
    assert [group.queries for group in verdict.groups] == [queries[:3]]
    assert verdict.groups[0].avoid == "a"


def test_groups_are_halved_at_each_further_death() -> None:
    queries = make_queries(5)
    for query in queries:
        query.deaths = 2
    verdict = judge(queries, Group(queries), alone=False, server="a", births=1)
    assert [group.queries for group in verdict.groups] == [queries[:3], queries[3:]]


def test_two_deaths_alone_convict_when_the_server_came_up_in_between() -> None:
    (query,) = make_queries(1)
    query.deaths = 2
    group = Group([query])
    for births, convicted in ((1, False), (1, False), (2, True)):
        verdict = judge([query], group, alone=True, server="a", births=births)
        assert bool(verdict.convicted) is convicted
        if verdict.groups:
            (group,) = verdict.groups
    assert query.deaths_alone == 2


def test_a_death_on_another_server_proves_as_much() -> None:
    (query,) = make_queries(1)
    query.deaths = 2
    (group,) = judge([query], Group([query]), alone=True, server="a", births=1).groups
    assert judge([query], group, alone=True, server="b", births=1).convicted == [query]


def test_a_poisonous_query_is_found_in_logarithmic_deaths_and_its_mates_live() -> None:
    queries = make_queries(64)
    for query in queries:
        query.deaths = 1
    poison = queries[37]
    groups = judge(queries, None, alone=False, server="a", births=1).groups
    answered, convicted, deaths = 0, [], 1
    while groups:
        group = groups.pop()
        if poison not in group.queries:
            answered += len(group.queries)
            continue
        deaths += 1
        alone = len(group.queries) == 1
        verdict = judge(group.queries, group, alone=alone, server="a", births=deaths)
        groups += verdict.groups
        convicted += verdict.convicted
    assert convicted == [poison]
    assert answered == 63
    assert deaths <= 10


def test_groups_wait_for_their_time_room_and_another_server() -> None:
    suspects = Suspects()
    queries = make_queries(4)
    for query in queries:
        query.estimate = 10.0
    suspects.add(Group(queries, "a", not_before_ns=5 * MS))

    def ask(server: str, now_ns: int, *, tokens: float = 100.0, any_server: bool = False) -> bool:
        group = suspects.next_for(
            server, now_ns, tokens_max=tokens, inputs_max=9, any_server=any_server
        )
        if group is not None:
            suspects.add(group)
        return group is not None

    assert suspects.wake_at_ns(0) == 5 * MS
    assert not ask("b", 4 * MS)
    assert not ask("a", 5 * MS)
    assert not ask("b", 5 * MS, tokens=39)
    assert ask("b", 5 * MS)
    assert ask("a", 5 * MS, any_server=True)
    assert len(suspects) == 4


def test_a_group_of_more_than_the_servers_inputs_is_split() -> None:
    suspects = Suspects()
    suspects.add(Group(make_queries(5)))
    sizes = []
    while len(suspects):
        group = suspects.next_for("a", 0, tokens_max=NEVER_NS, inputs_max=2, any_server=True)
        assert group is not None
        sizes.append(len(group.queries))
    assert sizes == [2, 2, 1]


def test_suspects_can_be_removed_and_expire() -> None:
    suspects = Suspects()
    queries = make_queries(3)
    queries[1].deadline_ns = 7 * MS
    suspects.add(Group(queries))
    suspects.add(Group([]))
    assert suspects.wake_at_ns(0) == 7 * MS
    assert suspects.remove(lambda query: query is queries[1]) == [queries[1]]
    assert len(suspects) == 2
    assert suspects.wake_at_ns(0) == NEVER_NS
