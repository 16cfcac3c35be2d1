"""Trees of every shape that the viewer draws: flat, chat, branched, grafted, both, wide, deep,
empty and of one leaf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean

from tests.support.viewed import plain_tree, step

from treegraft.core.types import (
    BranchCause,
    BranchDecision,
    Cause,
    ContinuationCause,
    GraftCause,
    Leaf,
    Observation,
    StartCause,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Tree,
)

ENDS = (Status.TRUNCATED, Status.FORMAT_VIOLATION, Status.FAILED)
GRAFT = GraftCause(source="expert", task_id="t/9", reward=1.0, similarity=0.875)
BRANCH = BranchCause(entropy_change=0.002, probability=0.5004, rule="threshold", bar=0.5)
REFUSED = BranchCause(entropy_change=-0.002, probability=0.4996, rule="threshold", bar=0.5)
KNOWN = {"e36 r1": "e12", "e12 r2": "e9", "e9 r3": "e3"}
"""The way to the answer; other searches find something else."""


def considered(wanted: int, opened: int) -> BranchDecision:
    """Returns a decision on a branch: so many wanted, so many opened."""
    return BranchDecision(seen=BRANCH if wanted else REFUSED, num_wanted=wanted, num_opened=opened)


def search(body: str, *, fails: bool = False) -> StepContent:
    """Returns a call with its result."""
    entity, relation = body.split()
    found = KNOWN.get(body, f"e{100 + int(entity[1:]) + 10 * int(relation[1:])}")
    seen = f"no entity {entity}" if fails else f"{relation} of {entity} is {found}"
    return StepContent(
        calls=(ToolCall("search", body),), observations=(Observation(text=seen, is_error=fails),)
    )


@dataclass
class Grown:
    """A tree under way: steps are added below steps, and leaves where they end."""

    question: str = "r3 of r2 of r1 of e36 ?"
    steps: list[Step] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    fresh: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.steps.append(step("0", "pppp", StepContent(thought=self.question), None))

    def add(
        self,
        parent: str,
        content: StepContent,
        cause: Cause | None = None,
        *,
        same: int = 0,
        decision: BranchDecision | None = None,
    ) -> str:
        """Adds a step and returns its id; steps of one number `same` have equal tokens, those of 0
        differ from all."""
        name = f"{parent}.{sum(one.parent == parent for one in self.steps)}"
        usual = StartCause() if parent == "0" else ContinuationCause()
        marks = "rrrr" if isinstance(cause, GraftCause) else "sss" + "tt" * bool(content.calls)
        made = step(name, marks, content, cause or usual)
        first = -same if same else next(self.fresh)
        ids = (first % 100_003, *made.token_ids.tolist()[1:])
        # Where a branch was wanted, entropy rose.
        rise = 0.05 + 0.05 * (len(self.steps) % 7) if decision and decision.num_wanted else -0.05
        sampled = (entropy + rise if entropy else 0.0 for entropy in made.entropies.tolist())
        entropies = tuple(sampled) if decision else made.entropies
        self.steps.append(replace(made, token_ids=ids, decision=decision, entropies=entropies))
        return name

    def answer(
        self,
        parent: str,
        answer: str,
        *,
        right: bool = False,
        cause: Cause | None = None,
        same: int = 0,
        status: Status = Status.COMPLETED,
    ) -> None:
        """Adds a last step with its leaf: an answer where it was completed, else a thought; a
        failed leaf has no reward."""
        is_failed = status is Status.FAILED
        is_done = status is Status.COMPLETED
        content = StepContent(answer=answer) if is_done else StepContent(thought=f"maybe {answer}")
        where = self.add(parent, content, cause, same=same)
        self.leaves.append(
            Leaf(
                step_id=where,
                status=status,
                reward=None if is_failed else -1.0 if status in ENDS else float(right),
                is_correct=None if is_failed else right,
                has_loss=not is_failed,
                answer=answer if is_done else None,
            )
        )

    def done(self, task: str = "t/1", expected: str = "e3") -> Tree:
        """Returns the tree, its advantages being rewards less their mean."""
        mean = fmean([one.reward for one in self.leaves if one.reward is not None] or [0.0])
        leaves = tuple(
            replace(
                one,
                weight=1 / len(self.leaves),
                advantage=None if one.reward is None else one.reward - mean,
            )
            for one in self.leaves
        )
        return Tree(
            task=Task(id=task, question=self.question, reference=(expected,)),
            group_id=f"1/{task}",
            steps=tuple(self.steps),
            leaves=leaves,
        )


def flat() -> Tree:
    """GRPO: 16 starts, 13 of them with one first step, two of them right."""
    tree = Grown()
    for n in range(16):
        start = tree.add("0", search("e36 r1"), same=1 if n < 13 else 0)
        tree.answer(
            start, "e3" if n in (3, 9) else "e41", right=n in (3, 9), same=0 if n % 4 else 7
        )
    return tree.done()


def chat() -> Tree:
    """Long thoughts, two tools with JSON arguments, a result that is an error."""
    tree = Grown("A box holds 12 bags with 17 apples each. 39 apples are eaten. How many are left?")
    for n in range(5):
        thought = f"I multiply 12 by 17 first, then I take away what was eaten, attempt {n}. " * 4
        # The first two are right; the third has a bracket too many, the others take away 19.
        formula, result = (
            ("12 * 17 - 39", "165")
            if n < 2
            else ("(12 * 17", "syntax error in line 1")
            if n == 2
            else ("12 * 17 - 19", "185")
        )
        call = ToolCall("calculator", f'{{"expression": "{formula}"}}')
        seen = Observation(text=result, is_error=n == 2)
        left = result if n != 2 else "204"
        start = tree.add("0", StepContent(thought=thought, calls=(call,), observations=(seen,)))
        said = f"{left} apples are left in the box"
        note = ToolCall("notes", f'{{"text": "{said}", "tags": ["sum"]}}')
        kept = tree.add(start, StepContent(calls=(note,), observations=(Observation(text="kept"),)))
        tree.answer(kept, f"{said} after 39 were eaten. " * 3, right=n < 2)
    return tree.done(expected="165")


def branched() -> Tree:
    """ARPO: branches where entropy rose, refusals of both kinds, every kind of end."""
    tree = Grown()
    for n in range(8):
        start = tree.add("0", search(f"e36 r{n}"))
        mark = considered(1, 1) if n % 2 else considered(n % 4 // 2, 0)
        mine = tree.add(start, search(f"e4{n} r2"), decision=mark)
        tree.answer(mine, f"e5{n}", status=(*ENDS, Status.COMPLETED)[n % 4])
        if n % 2:
            other = tree.add(start, search(f"e9{n} r7", fails=n == 3), BRANCH)
            tree.answer(other, "e3" if n == 5 else f"e8{n}", right=n == 5)
    return tree.done()


def grafted(*, branches: bool = False) -> Tree:
    """RAPO: starts with and without a graft; with `branches` also a branch beside each graft."""
    tree = Grown()
    for n in range(8):
        start = tree.add("0", search("e36 r1"), same=1)
        after = tree.add(start, search("e12 r2"), GRAFT) if n % 2 else start
        deeper = tree.add(after, search(f"e5{n} r3"), decision=considered(1, int(branches)))
        tree.answer(deeper, "e3" if n % 2 else f"e6{n}", right=n % 2 == 1)
        if branches:
            status = ENDS[0] if n == 2 else Status.COMPLETED
            tree.answer(after, f"e7{n}", cause=BRANCH, status=status)
    return tree.done()


def wide() -> Tree:
    """64 leaves, none equal to another."""
    tree = Grown()
    for n in range(16):
        start = tree.add("0", search(f"e{n} r1"))
        for k in range(4):
            cause = BRANCH if k else None
            is_right = (n, k) in ((2, 1), (11, 3))
            answer = "e3" if is_right else f"e{n}{k}"
            tree.answer(start, answer, right=is_right, cause=cause)
    return tree.done()


def deep() -> Tree:
    """Six leaves of up to 12 steps, every third step a graft."""
    tree = Grown()
    for n in range(6):
        at = "0"
        for depth in range(7 + n if n < 5 else 11):
            cause = GRAFT if depth % 3 == 2 else None
            same = depth + 1 if n < 3 and depth < 4 else 0
            at = tree.add(at, search(f"e{10 + depth} r{0 if same else n}"), cause, same=same)
        status = ENDS[1] if n == 2 else Status.COMPLETED
        tree.answer(at, "e3" if n == 4 else f"e6{n}", right=n == 4, status=status)
    return tree.done()


SHAPES: dict[str, Callable[[], Tree]] = {
    "flat": flat,
    "chat": chat,
    "branched": branched,
    "grafted": grafted,
    "both": lambda: grafted(branches=True),
    "wide": wide,
    "deep": deep,
    "empty": lambda: Grown().done(),
    "one leaf": lambda: plain_tree(1, "t/1"),
}
"""The trees by name, in the order of their groups in a run."""
