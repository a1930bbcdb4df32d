"""Runs a rollout loop in the test process against a fake server; what it sends home lands in a list."""

import asyncio
from dataclasses import dataclass, field

from lit_rl import metrics
from lit_rl.rollout.admission import AsyncAdmission
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.rollout.loop import Parts, RolloutLoop
from lit_rl.rollout.prompts import PromptSource
from lit_rl.rollout.reward_functions import RewardFunction
from lit_rl.rollout.sampler import Sampler
from lit_rl.rollout.scoring import Scorer
from lit_rl.settings import EndpointSpec, RolloutSettings
from lit_rl.types import DroppedGroup, EvalResult, RolloutReport, SampleGroup
from tests.fakes.server import FakeServer
from tests.fakes.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = 1


class Home:
    """The trainer's end, as far as the loop sees it."""

    def __init__(self):
        self.messages = []

    async def put(self, message):
        if not isinstance(message, EvalResult):
            metrics.merge_into({}, message.stats)
        self.messages.append(message)

    def take_blocked_seconds(self):
        return 0.0

    def of(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def groups(self):
        return self.of(SampleGroup)

    @property
    def dropped(self):
        return self.of(DroppedGroup)

    @property
    def outcomes(self):
        return self.of((SampleGroup, DroppedGroup))

    @property
    def reports(self):
        return self.of(RolloutReport)


@dataclass
class Drive:
    """A loop to be run; ``until`` gets the drive and says when it is over."""

    server: FakeServer
    rows: list
    rewards: list
    loop_class: type = RolloutLoop
    evals: dict = field(default_factory=dict)
    start: LedgerStart = field(default_factory=LedgerStart)
    eos: frozenset = frozenset({EOS})
    version: int = 1
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        self.home = Home()
        options = {"num_generations": 4, "max_completion_length": 8, "max_retries": 1, **self.settings}
        self.config = RolloutSettings(**options)

    def run(self, until, timeout=20.0):
        """Runs the loop until ``until(self)``; raises what the loop raises, or TimeoutError."""
        asyncio.run(asyncio.wait_for(self._run(until), timeout))
        return self.home

    async def _run(self, until):
        endpoint = EndpointSpec((self.server.url,), "fake-model", 10.0, generate_route=True)
        names = [getattr(reward, "__name__", "reward") for reward in self.rewards]
        functions = [RewardFunction(name, f, 1.0, 10.0) for name, f in zip(names, self.rewards, strict=True)]
        self.parts = Parts(
            sampler=Sampler(endpoint, self.config, backoff_s=0.01),
            source=PromptSource(self.rows, TOKENIZER, self.config, self.start),
            admission=AsyncAdmission(
                self.config.max_concurrent_rollouts, lambda: self.version, self.config.release_by_version
            ),
            scorer=Scorer(functions, self.config.drop_equal_rewards),
            outbox=self.home,
            version=lambda: self.version,
            eos_token_ids=self.eos,
            evals=self.evals,
        )
        self.loop = self.loop_class(self.config, TOKENIZER, self.parts)
        stop = asyncio.Event()
        work = asyncio.ensure_future(self.loop.run(stop))
        while not work.done() and not until(self):
            await asyncio.sleep(0.005)
        stop.set()
        await work


def text_ids(text):
    """The tokens of plain text."""
    return [int(i) for i in TOKENIZER(text)["input_ids"]]
