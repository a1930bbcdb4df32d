"""Stop 5: reward functions: loading them, refusing what cannot cross to another process, calling them safely."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_rl.errors import RewardError, SettingsError
from lit_rl.settings import Reward

_KEY = "data.rewards[].fn"
_MODULE_LEVEL = "define it at the top level of a module and give its import path, or the function itself"


@dataclass
class RewardFunction:
    """A reward function ready to be called.

    Attributes:
        name: Its name in metrics and messages.
        call: The function.
        weight: Its factor in the sum.
        timeout: Seconds after which a call counts as hung.
    """

    name: str
    call: Callable[..., Any]
    weight: float
    timeout: float
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_async(self) -> bool:
        target = self.call.func if isinstance(self.call, functools.partial) else self.call
        called = type(target).__call__  # an instance of a class may have an asynchronous one
        return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(called)

    async def __call__(self, wanted: int, arguments: dict[str, Any]) -> np.ndarray:
        """The rewards of one group.

        A synchronous function runs in a thread, one call at a time (it need not be thread-safe); an asynchronous one on
        the event loop. Woken by the function's end, or by ``timeout``.

        Args:
            wanted: Rollouts of the group.
            arguments: What the function gets by name, as far as it takes it.

        Returns:
            [wanted] float64, NaN where the function gave None.

        Raises:
            RewardError: it raised, hung, or returned something else than ``wanted`` numbers.
        """
        call = functools.partial(self.call, **accepted(self.call, arguments))
        if self.is_async:
            values = await self._within_limit(call())
        else:
            async with self._turn:
                values = await self._within_limit(in_daemon_thread(call))
        return checked_values(self.name, values, wanted)

    async def _within_limit(self, answer: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await answer
        except Exception as cause:
            if limit.expired():
                raise RewardError(
                    f"reward function {self.name!r} gave no answer within {self.timeout:g} s; raise its `timeout` in "
                    "data.rewards if it may take longer"
                ) from cause
            # The command line shows errors of lit_rl without a traceback, and here the user needs theirs.
            frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename != __file__]
            where = "".join(traceback.format_list(frames[-6:]))
            raise RewardError(f"reward function {self.name!r} raised {cause!r}\n{where}") from cause


def load_reward(reward: Reward) -> RewardFunction:
    """The function that ``reward`` names.

    Raises:
        SettingsError: no such function, not callable, or not one that another process can import.
    """
    call = import_object(reward.fn, _KEY) if isinstance(reward.fn, str) else reward.fn
    if not callable(call):
        raise SettingsError(_KEY, reward.fn, "this is no function; give the import path of one")
    name = reward.name or _name(call)
    if "/" in name or not name:
        raise SettingsError(
            "data.rewards[].name", name, "it becomes part of a metric's name: not empty, without a slash"
        )
    return RewardFunction(name, call, reward.weight, reward.timeout)


def load_rewards(rewards: Sequence[Reward]) -> list[RewardFunction]:
    """All of them; refuses two with the same name."""
    functions = [load_reward(reward) for reward in rewards]
    names = [function.name for function in functions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError("data.rewards[].name", twice, "two reward functions of one name; give each its own `name`")
    return functions


def check_picklable(rewards: Sequence[Reward]) -> None:
    """Refuses functions that a spawned process cannot have: lambdas, closures, whatever does not pickle.

    Raises:
        SettingsError: names the function and the reason.
    """
    for reward in rewards:
        if isinstance(reward.fn, str):
            continue
        inner = reward.fn.func if isinstance(reward.fn, functools.partial) else reward.fn
        qualified = getattr(inner, "__qualname__", "")
        if "<lambda>" in qualified or "<locals>" in qualified:
            kind = "a lambda" if "<lambda>" in qualified else "defined inside another function"
            remedy = f"it is {kind}, and rewards run in another process, which cannot import that; {_MODULE_LEVEL}"
            raise SettingsError(_KEY, qualified, remedy)
        try:
            pickle.dumps(reward.fn)
        except (pickle.PicklingError, AttributeError, TypeError) as cause:
            remedy = f"rewards run in another process, and this does not pickle ({cause}); {_MODULE_LEVEL}"
            raise SettingsError(_KEY, qualified or repr(reward.fn), remedy) from cause


def import_object(path: str, key: str) -> Any:
    """The object at ``package.module.name`` (or ``package.module:name``).

    Raises:
        SettingsError: naming ``key``: there is no such module or name, or importing it fails.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise SettingsError(key, path, "give the whole import path, for instance my_package.rewards.exact")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except ImportError as cause:
        raise SettingsError(key, path, f"the module cannot be imported: {cause}") from cause
    except AttributeError as cause:
        raise SettingsError(key, path, f"{cause}; give the name of a function in {module_name}") from cause


def accepted(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that ``call`` takes: all with ``**kwargs``, else those it names."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some builtins tell no signature
        return arguments
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in arguments.items() if name in names}


def checked_values(name: str, values: Any, wanted: int) -> np.ndarray:
    """[wanted] float64 of what a reward function returned, NaN for None.

    Raises:
        RewardError: not a flat list, tuple, array or tensor of ``wanted`` finite numbers or None.
    """
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"reward function {name!r} returned shape {tuple(shape)}; wanted {wanted} values in one row")
    if hasattr(values, "tolist"):  # an array, or a tensor of any framework
        values = values.tolist()
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise RewardError(
            f"reward function {name!r} returned a {kind} ({values!r:.200}); wanted a list of {wanted} values"
        )
    if len(values) != wanted:
        raise RewardError(f"reward function {name!r} returned {len(values)} values; wanted {wanted}, one per rollout")
    return np.array([_number(name, place, value) for place, value in enumerate(values)], dtype=np.float64)


def _number(name: str, place: int, value: Any) -> float:
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():  # an array or tensor of one number
        value = value.item()
    if not isinstance(value, int | float | np.number):
        kind = type(value).__name__
        raise RewardError(
            f"reward function {name!r} returned a {kind} for rollout {place} ({value!r:.200}); wanted a number"
        )
    if math.isinf(value):
        raise RewardError(
            f"reward function {name!r} returned {value} for rollout {place}; give a finite number, or None where the "
            "rollout cannot be scored"
        )
    return float(value)


async def in_daemon_thread(call: Callable[[], Any]) -> Any:
    """``call()`` in a thread of its own.

    Not in asyncio's pool: the interpreter waits for a pool's threads when it ends, and a hung reward would hold it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            outcome: tuple[Any, Exception | None] = (call(), None)
        except Exception as error:  # noqa: BLE001  (handed to the waiting task)
            # A future cannot carry StopIteration.
            outcome = (None, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        except BaseException as error:  # noqa: BLE001  (SystemExit would end this thread alone, in silence)
            outcome = (None, RuntimeError(f"it raised {error!r}"))
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="lit-rl-reward", daemon=True).start()
    return await done


def _name(call: Any) -> str:
    target = call.func if isinstance(call, functools.partial) else call
    return getattr(target, "__name__", type(target).__name__)
