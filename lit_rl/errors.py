"""The errors of lit_rl: one small tree, each message one screen long, naming key, value and remedy."""

from __future__ import annotations

import json


class LitRLError(Exception):
    """Base of all errors that lit_rl raises on purpose; the command line prints them without a traceback."""


class UsageError(LitRLError):
    """The command line or a configuration file cannot be understood."""


class SettingsError(LitRLError):
    """An option has a value that cannot work.

    Args:
        key: The key as the user types it, for instance ``data.num_generations``.
        value: What was given.
        remedy: A sentence that says what to do instead.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        self.key, self.value, self.remedy = key, value, remedy
        super().__init__(f"{key} = {value!r}: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.key, self.value, self.remedy))


class DataError(LitRLError):
    """The dataset cannot be used: no ``prompt`` column, no rows, a prompt of the wrong shape."""


class RewardError(LitRLError):
    """A reward function raised, or returned the wrong number or type of values."""


class ServerError(LitRLError):
    """The sampling server cannot be used."""


class ServerUnreachable(ServerError):
    """The server did not answer, or not within the engine's timeout."""


class ServerRefused(ServerError):
    """The server answered and said no.

    Args:
        route: The route that was asked.
        status: The HTTP status.
        body: What the server said (cut to a screenful).
    """

    def __init__(self, route: str, status: int, body: str) -> None:
        self.route, self.status, self.body = route, status, body
        super().__init__(f"the server answered {route} with status {status}: {body[:2000]}")

    @classmethod
    def answered(cls, route: str, status: int, text: str) -> ServerRefused:
        """From an answer as it came; of vLLM's JSON body only the sentence inside is kept."""
        try:
            words = str(json.loads(text)["error"]["message"])
        except (json.JSONDecodeError, KeyError, TypeError):
            words = text
        return cls(route, status, words)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.route, self.status, self.body))


class SyncError(LitRLError):
    """A weight sync failed: refused, timed out, or only half done."""


class ReceiptError(SyncError):
    """A weight sync was accepted, but the server's log-probs say that the new policy did not arrive."""


class ProducerError(LitRLError):
    """The rollout process cannot go on."""


class ProducerDied(ProducerError):
    """The rollout process ended; the message carries its traceback or its exit code."""


class ProducerSilent(ProducerError):
    """The rollout process lives but has given no heartbeat for ``data.worker_timeout`` seconds."""


class PackingError(LitRLError):
    """Samples cannot be packed as asked."""


class NonFiniteError(LitRLError):
    """A loss term under the mask is NaN or infinite; names the sample."""
