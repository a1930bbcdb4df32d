"""Stop 1: dataset rows become ``Prompt``s, in the ledger's order.

An epoch's order is the dataset's own, or a permutation that depends on seed and epoch alone, so that a position means
the same row after a resume. Message prompts go through the chat template, plain text is encoded as it stands.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lit_rl.errors import DataError
from lit_rl.rollout.ledger import LedgerStart
from lit_rl.settings import RolloutSettings
from lit_rl.types import Message, Position, Prompt, PromptContent

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "truncated")
"""What reward functions get from lit_rl under these names; a column of the same name would be lost."""

_CHECKED_ROWS = 1000
_BATCH = 1024


class Rows(Protocol):
    """What a dataset must offer: a length and rows by index (``datasets.Dataset``, or a list of dicts)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PromptSource:
    """Draws prompts: positions to be dispatched again first, then epoch by epoch.

    Args:
        dataset: The rows.
        tokenizer: The model's tokenizer.
        settings: Order, seed and number of epochs.
        start: Where the ledger says that drawing begins.
    """

    def __init__(self, dataset: Rows, tokenizer: Any, settings: RolloutSettings, start: LedgerStart) -> None:
        self._dataset, self._tokenizer, self._settings = dataset, tokenizer, settings
        self._again: deque[Position] = deque(start.redispatch)
        self._next = Position(start.epoch, start.index)
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._dataset)

    def draw(self) -> Prompt | None:
        """The next prompt; None while there is nothing to dispatch (``max_epochs`` reached).

        Raises:
            DataError: the row's prompt cannot be used.
        """
        position = self._again.popleft() if self._again else self._new_position()
        return None if position is None else self._prompt(position)

    def redispatch(self, position: Position) -> None:
        """Draws ``position`` again, before anything new."""
        self._again.append(position)

    def _new_position(self) -> Position | None:
        position = self._next
        limit = self._settings.max_epochs
        if limit is not None and position.epoch >= limit:
            return None
        last = position.index + 1 == len(self._dataset)
        self._next = Position(position.epoch + 1, 0) if last else Position(position.epoch, position.index + 1)
        return position

    def _prompt(self, position: Position) -> Prompt:
        if position.epoch != self._order_epoch:
            settings = self._settings
            self._order = order_of_epoch(len(self._dataset), settings.seed, position.epoch, settings.shuffle)
            self._order_epoch = position.epoch
        row_index = int(self._order[position.index])
        return make_prompt(self._dataset, row_index, position, self._tokenizer, self._settings.chat_template_kwargs)


def order_of_epoch(n: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """[n] int64: the dataset row at each place of an epoch's order; a function of its arguments alone."""
    if not shuffle:
        return np.arange(n)
    return np.random.default_rng((seed, epoch)).permutation(n)


def make_prompt(
    dataset: Rows, row_index: int, position: Position, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> Prompt:
    """Row ``row_index`` as a prompt with its tokens.

    Raises:
        DataError: the prompt is of the wrong shape, or the template refuses it.
    """
    row = dict(dataset[row_index])
    content = read_content(row.pop("prompt", None), row_index)
    try:
        prompt_ids = encode_prompt(tokenizer, content, chat_template_kwargs)
    except DataError as cause:
        raise DataError(f"row {row_index} of the dataset: {cause}") from cause
    return Prompt(position, row_index, content, prompt_ids, row)


def read_content(value: Any, row_index: int) -> PromptContent:
    """The ``prompt`` column's value as plain text or a message list; raises DataError for anything else."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_message, value)):
        return [_without_none(message) for message in value]
    shown = repr(value)
    raise DataError(
        f"row {row_index} of the dataset has the prompt {shown[:200]}; give a text that is not empty, or a list of "
        'messages such as [{"role": "user", "content": "..."}]'
    )


def encode_prompt(tokenizer: Any, content: PromptContent, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """The tokens of a prompt: text as it stands, messages through the chat template with a generation prompt.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the messages, or nothing comes out.
    """
    if isinstance(content, str):
        ids = tokenizer(content)["input_ids"]
    else:
        ids = _templated(tokenizer, [content], chat_template_kwargs)[0]
    if not ids:
        raise DataError(f"the prompt {content!r:.200} has no tokens")
    return [int(i) for i in ids]


def longest_prompt(dataset: Rows, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt of a dataset, in batches.

    Raises:
        DataError: a prompt cannot be used.
    """
    longest = 0
    for batch in _batches(dataset):
        texts = [content for content in batch if isinstance(content, str)]
        chats = [content for content in batch if not isinstance(content, str)]
        rows = list(tokenizer(texts)["input_ids"]) if texts else []
        rows += _templated(tokenizer, chats, chat_template_kwargs) if chats else []
        longest = max(longest, *(len(row) for row in rows))
    return longest


def check_dataset(dataset: Any, key: str = "data.train") -> None:
    """Raises DataError unless ``dataset`` has rows, a ``prompt`` column of a usable shape and no reserved column."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise DataError(f"{key} is a {kind}; give a dataset with a length, such as datasets.Dataset or a list of rows")
    if len(dataset) == 0:
        raise DataError(f"{key} has no rows; check its path, split and filters")
    first = dataset[0]
    if not isinstance(first, Mapping) or "prompt" not in first:
        found = sorted(first) if isinstance(first, Mapping) else type(first).__name__
        raise DataError(f"{key} has no column `prompt`; it has {found}. Rename the column that holds the prompts")
    clash = [name for name in RESERVED_COLUMNS if name in first]
    if clash:
        raise DataError(f"{key} has the columns {clash}, which reward functions get from lit_rl; rename them")
    for index in range(min(len(dataset), _CHECKED_ROWS)):  # the rest is checked when it is drawn
        try:
            read_content(dataset[index].get("prompt"), index)
        except DataError as cause:
            raise DataError(f"{key}: {cause}") from cause


def dataset_fingerprint(dataset: Rows) -> str:
    """A short digest of size, columns and up to 64 rows spread over the dataset; the same in every process."""
    n = len(dataset)
    digest = hashlib.sha256(str(n).encode())
    for index in sorted({i * n // 64 for i in range(64)} | {n - 1}):
        digest.update(repr(sorted(dict(dataset[index]).items())).encode())
    return digest.hexdigest()[:16]


def _batches(dataset: Rows) -> Iterator[list[PromptContent]]:
    for begin in range(0, len(dataset), _BATCH):
        end = min(begin + _BATCH, len(dataset))
        yield [read_content(dataset[i].get("prompt"), i) for i in range(begin, end)]


def _templated(tokenizer: Any, chats: list[list[Message]], kwargs: Mapping[str, Any]) -> list[list[int]]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "the prompts are message lists, but the tokenizer has no chat template; give one that has as "
            "model.tokenizer, or plain-text prompts"
        )
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
    except jinja2.TemplateError as cause:
        raise DataError(f"the chat template refuses the messages {chats[0]!r:.300}: {cause}") from cause


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value


def _without_none(message: Mapping[str, Any]) -> Message:
    """Arrow gives each row every key that any row has; templates take such a None for a tool call or a thought."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}
