"""The same step on every rank: rank 0 plans and samples, the others follow its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import FLIGHT_ROWS, Batch, PromptSlice
from engine.parallel.collectives import RankGroup
from engine.parallel.messages import Step
from engine.parallel.team import Team
from engine.request import TokenLogprob
from engine.runner import LaunchedStep, Runner
from engine.scheduler import Plan, PlanItem


@dataclass(frozen=True)
class GuardedStep(LaunchedStep):
    """A launched step whose outcome counts only while all ranks are there."""

    team: Team

    def read(self) -> list[tuple[PlanItem, int, TokenLogprob | None]]:
        """As `LaunchedStep.read`. Raises `WorkerLost`."""
        outcome = super().read()
        self.team.check()
        return outcome


class RankRunner(Runner):
    """A runner whose steps are computed by all ranks together.

    Args:
        group: the ranks.
        settings: as for `Runner`.
    """

    def __init__(self, *settings: Any, group: RankGroup) -> None:
        super().__init__(*settings)
        self._group = group

    def _compute(self, plan: Plan, batch: Batch, *, is_recorded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        if bool((batch.inputs[FLIGHT_ROWS] >= 0).any()):
            # Rank 0 has sampled them; the others need them for their embeddings.
            self._group.copy_from_first_(self._flight_tokens.memory)
        return super()._compute(plan, batch, is_recorded=is_recorded)


class LeadingRunner(RankRunner):
    """Rank 0's runner, which the engine drives."""

    def __init__(self, *settings: Any, group: RankGroup, team: Team) -> None:
        super().__init__(*settings, group=group)
        self._team = team

    def launch(self, plan: Plan) -> LaunchedStep:
        """As `Runner.launch`, on all ranks. Raises `WorkerLost`."""
        step = super().launch(plan)
        return GuardedStep(step.sampled, step.choice, step.prompt_logprobs, self._team)

    def _compute(self, plan: Plan, batch: Batch, *, is_recorded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._team.in_step():
            self._team.send(Step.of(batch, is_recorded=is_recorded))
            return super()._compute(plan, batch, is_recorded=is_recorded)


class FollowingRunner(RankRunner):
    """A worker's runner."""

    @torch.inference_mode()
    def follow(self, step: Step) -> None:
        """Compute this rank's share of a step."""
        self._compute(Plan(), step.batch(), is_recorded=step.is_recorded)

    def _score(self, hidden: torch.Tensor, slices: Sequence[PromptSlice]) -> None:
        """The head's share alone, which takes all ranks: what follows from the logits is rank 0's."""
        for each in slices:
            self._slice_logits(hidden, each)
